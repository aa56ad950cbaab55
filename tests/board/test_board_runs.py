"""Runs that the board lists, processes that it starts, and who may use it; without a browser."""

import json
import os
import re
import shutil
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

pytest.importorskip("nicegui", reason="the extra `board` is not installed")
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

import lit_ft.board
from lit_ft.board.access import TokenGate
from lit_ft.board.board import Board
from lit_ft.board.pages.charts import thinned
from lit_ft.board.processes import Processes, Record, log_tail
from lit_ft.board.runs import Runs
from lit_ft.board.server import application
from lit_ft.board.texts import TEXTS, Texts, language_of
from lit_ft.commands import board as command
from lit_ft.errors import RecipeError
from lit_ft.run.folder import RunFolder

FOLDER = Path(lit_ft.board.__file__).parent
TRAINING = """
import fcntl, json, os, signal, socket, sys, time
from pathlib import Path
if "--fail" in sys.argv:
    sys.exit("lit_ft: error: data.path='x' does not exist; fix it")
root = Path(sys.argv[sys.argv.index("--run_dir") + 1] if "--run_dir" in sys.argv else sys.argv[3]).resolve()
root = root.parent if root.name == "config.yaml" else root
(root / "config.yaml").write_text("model: {}\\ndata: {}\\ntrainer: {}\\nseed_everything: 1\\n")
lock = (root / ".lock").open("w")
fcntl.lockf(lock, fcntl.LOCK_EX)
json.dump({"host": socket.gethostname(), "pid": os.getpid(), "start": "now"}, lock)
lock.flush()
def stop(*_):
    (root / "checkpoints").mkdir(exist_ok=True)
    (root / "checkpoints" / "last.ckpt").touch()
    print(f"lit_ft: stopped; resume with: python -m lit_ft fit --config {root}/config.yaml --ckpt_path last")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
(root / "started").write_text(str(os.getpgid(0)))
while True:
    time.sleep(0.05)
"""
"""Stands for ``python -m lit_ft``: it locks its run folder and stops as a training does."""


def wait(found: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    return (sys.executable, "-S", str(script))


@pytest.fixture
def board(tmp_path: Path, program: tuple[str, ...]) -> Iterator[Board]:
    found = Board([tmp_path / "runs"], Path("recipes"), lambda: pytest.fail("no form is shown"), Processes(program))
    yield found
    for record in tmp_path.glob("runs/**/*.json"):
        if record.name == "fit.json":
            one = Record(**json.loads(record.read_text()))
            if found.processes.is_alive(one):
                os.killpg(one.pid, signal.SIGKILL)


# --- runs ------------------------------------------------------------------------------------------


def make_run(folder: Path, steps: int = 0, finished: int | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {}\n")
    (folder / "checkpoints").mkdir()
    if steps:
        lines = [f"0,{step},{1 / (step + 1)},{'2.5' if step == steps - 1 else ''}" for step in range(steps)]
        (folder / "metrics.csv").write_text("epoch,step,train/loss,val/loss\n" + "\n".join(lines) + "\n")
    if finished is not None:
        (folder / "finished.json").write_text(json.dumps({"global_step": finished}))
    return folder


def test_runs_are_found_in_all_folders_by_their_files(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "qwen" / "2026-01-01", steps=4, finished=4)
    make_run(tmp_path / "a" / "sweep" / "trials" / "trial-001", steps=2)
    make_run(tmp_path / "a" / ".hidden" / "run")
    (tmp_path / "a" / "no-run").mkdir()
    (tmp_path / "a" / "no-run" / "config.yaml").write_text("")
    make_run(tmp_path / "b")
    runs = Runs([tmp_path / "a", tmp_path / "b", tmp_path / "absent"], Processes())
    found = {one.name: one for one in runs.summaries()}
    assert set(found) == {"0/qwen/2026-01-01", "0/sweep/trials/trial-001", "1"}
    first = found["0/qwen/2026-01-01"]
    assert (first.state, first.step, first.loss, first.val_loss) == ("finished", 4, 0.25, 2.5)
    second = found["0/sweep/trials/trial-001"]
    assert (second.state, second.step, second.title) == ("stopped", 2, "sweep/trials/trial-001")
    assert (found["1"].title, found["1"].step, found["1"].loss) == ("b", 0, None)


@pytest.mark.parametrize("name", ["0/../secret", "0//etc", "../secret", "0/qwen/../../secret", "2/x", "", "/etc"])
def test_a_name_outside_of_the_list_is_no_run(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "secret")
    make_run(tmp_path / "a" / "qwen")
    with pytest.raises(RecipeError, match="there is no run"):
        Runs([tmp_path / "a"], Processes()).folder(name)


def test_links_are_not_followed(tmp_path: Path) -> None:
    make_run(tmp_path / "outside")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "outside")
    assert Runs([tmp_path / "a"], Processes()).folders() == {}


def test_steps_of_a_run_are_read_from_its_log_and_metrics_again_when_they_change(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a" / "run", steps=2)
    (folder / "output.log").write_text("on 1 x cpu, 1,450 optimizer steps; an epoch\nstep 2 of 1,400, 3 s left: a 1\n")
    runs = Runs([tmp_path / "a"], Processes())
    assert runs.summaries()[0].steps == 1400
    with (folder / "metrics.csv").open("a") as file:
        file.write("0,9,0.125,\n,10,,2.0\n")  # a callback counts completed steps, and has no epoch
    assert (runs.summaries()[0].step, runs.summaries()[0].loss) == (10, 0.125)


def test_the_list_neither_reads_nor_keeps_the_curves_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        make_run(tmp_path / "a" / f"run-{number}", steps=5000)
    monkeypatch.setattr("lit_ft.board.runs.read_metrics", lambda path: pytest.fail(f"all of {path} is read"))
    found = Runs([tmp_path / "a"], Processes()).summaries()
    assert [(one.step, one.loss, one.val_loss) for one in found] == [(5000, 1 / 5000, 2.5)] * 3


def test_a_long_curve_is_thinned_to_means_and_without_what_is_not_finite() -> None:
    assert thinned([(1, 2.0), (2, 4.0), (3, float("nan")), (4, 6.0)], 2) == [[2, 3.0], [4, 6.0]]
    assert len(thinned([(step, 1.0) for step in range(10_001)], 400)) <= 400
    assert thinned([], 5) == []


# --- processes -------------------------------------------------------------------------------------


def test_a_run_is_started_survives_the_board_and_is_stopped_and_resumed_by_another(
    board: Board, tmp_path: Path, program: tuple[str, ...]
) -> None:
    name = board.start_run("first", ["--trainer.max_steps", "3"], "# mine\n")
    run = board.runs.folder(name)
    own = run.root / "board"
    assert (own / "first.yaml").read_text() == "# mine\n"
    wait(lambda: (run.root / "started").exists())
    record = board.processes.find(own, "fit")
    assert record is not None
    assert record.arguments[:3] == ["fit", "--trainer.max_steps", "3"]
    assert os.getsid(record.pid) == record.pid != os.getsid(0)  # neither Ctrl-C nor a closed terminal reaches it
    assert board.runs.summary(name, run).state == "running"
    with pytest.raises(RecipeError, match="fit is running already"):
        board.resume(run)

    another = Board([tmp_path / "runs"], Path("recipes"), lambda: None, Processes(program))  # type: ignore[arg-type]
    assert [one.state for one in another.runs.summaries()] == ["running"]
    assert another.can_stop(run)
    another.stop(run)
    wait(lambda: another.runs.summary(name, run).state == "stopped")
    assert "resume with" in log_tail(own / "fit.log")
    assert another.resume_arguments(run) == ["fit", "--config", f"{run.root}/config.yaml", "--ckpt_path", "last"]
    (run.root / "started").unlink()
    another.resume(run)
    wait(lambda: (run.root / "started").exists())
    assert another.runs.summary(name, run).state == "running"
    another.stop(run)
    wait(lambda: not another.runs.summary(name, run).is_active)
    assert another.processes.find(own, "fit").exit_code == 130  # type: ignore[union-attr]


def test_a_run_that_was_started_elsewhere_is_stopped_by_its_lock(board: Board, program: tuple[str, ...]) -> None:
    folder = board.runs.roots[0] / "elsewhere"
    folder.mkdir(parents=True)
    process = subprocess.Popen([*program, "fit", "--run_dir", str(folder)])
    wait(lambda: (folder / "started").exists())
    assert [(one.name, one.state) for one in board.runs.summaries()] == [("0/elsewhere", "running")]
    board.stop(RunFolder(folder))
    assert process.wait(30) == 130
    assert board.runs.summaries()[0].state == "stopped"


def test_a_run_that_fails_at_its_start_is_listed_with_its_error(board: Board) -> None:
    name = board.start_run("broken", ["--fail"], "")
    run = board.runs.folder(name)
    wait(lambda: not board.runs.summary(name, run).is_active)
    found = board.runs.summary(name, run)
    assert found.state == "failed"
    assert found.failure == "lit_ft: error: data.path='x' does not exist; fix it"
    record = board.processes.find(run.root / "board", "fit")
    assert record is not None
    assert board.resume_arguments(run) == record.arguments  # nothing was saved: the same again


def test_a_copied_run_is_resumed_in_its_own_folder_and_allows_no_code(board: Board) -> None:
    name = board.start_run("first", ["--trainer.max_steps", "3", "--allow_code", "theirs"], "")
    run = board.runs.folder(name)
    wait(lambda: (run.root / "started").exists())
    copied = RunFolder(run.root.with_name("copy"))
    shutil.copytree(run.root, copied.root)
    assert board.resume_arguments(copied) == ["fit", "--trainer.max_steps", "3", "--run_dir", str(copied.root)]
    assert board.runs.summary("copy", copied).state == "stopped"
    assert not board.can_stop(copied)
    assert board.runs.summary(name, run).state == "running"
    board.stop(run)
    wait(lambda: not board.runs.summary(name, run).is_active)
    with (run.root / "board" / "fit.log").open("a") as log:
        log.write(f"resume with: python -m lit_ft fit --config {run.config} --ckpt_path last --allow_code theirs\n")
    shutil.rmtree(copied.root)
    shutil.copytree(run.root, copied.root)
    assert board.resume_arguments(copied) == ["fit", "--config", str(copied.config), "--ckpt_path", "last"]


def test_pages_that_look_at_once_see_one_end(board: Board) -> None:
    run = board.runs.folder(board.start_run("broken", ["--fail"], ""))
    record = json.loads((run.root / "board" / "fit.json").read_text())
    wait(lambda: psutil.Process(record["pid"]).status() == psutil.STATUS_ZOMBIE)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: board.processes.find(run.root / "board", "fit"), range(8)))
    assert [one and one.exit_code for one in found] == [found[0] and found[0].exit_code] * 8 != [None] * 8


def test_another_process_with_the_id_of_an_ended_one_is_not_taken_for_it(board: Board) -> None:
    record = Record("fit", ["fit"], os.getpid(), started=1.0)
    assert not board.processes.is_alive(record)
    board.processes.stop(record)  # and no signal is sent to this process


def test_a_chat_server_ends_with_the_board_and_a_training_does_not(board: Board) -> None:
    run = board.runs.folder(board.start_run("first", [], ""))
    wait(lambda: (run.root / "started").exists())
    (run.root / "board" / "serve.py").touch()
    record = board.open_chat(run)
    assert record.arguments[0] == "serve"
    key = Path(record.arguments[record.arguments.index("--api_key_file") + 1])
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_text()) > 20
    assert key.read_text() not in (run.root / "board" / "serve.log").read_text()
    board.close()
    wait(lambda: not board.processes.is_alive(record))
    assert board.runs.summaries()[0].state == "running"


def test_a_killed_run_says_so_and_one_that_is_deleted_does_not_come_back(board: Board) -> None:
    name = board.start_run("first", [], "")
    run = board.runs.folder(name)
    wait(lambda: (run.root / "started").exists())
    record = board.processes.find(run.root / "board", "fit")
    assert record is not None
    os.killpg(record.pid, signal.SIGKILL)
    wait(lambda: board.runs.summary(name, run).state == "failed")
    failure = board.runs.summary(name, run).failure
    assert failure.startswith("killed by SIGKILL; its last line: $ python -m lit_ft fit --run_dir")
    shutil.rmtree(run.root)  # while a page shows it
    assert board.runs.summary(name, run).state == "stopped"
    for act in (board.write_report, lambda run: board.export(run, []), board.resume):
        with pytest.raises(RecipeError, match="cannot be written .No such file"):
            act(run)
    assert not run.root.exists()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a b", "x" * 65, "名\x00"])
def test_a_run_name_is_no_path(board: Board, name: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"name={name!r} must be")):
        board.start_run(name, [], "")
    assert not board.runs.roots[0].exists()


def test_of_a_long_log_the_end_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert log_tail(log, 40).splitlines()[-1] == "line 999"
    assert log_tail(log, 40).startswith("line 9")
    assert log_tail(tmp_path / "absent") == ""


def test_checks_are_found_by_the_name_that_was_given_out(board: Board, tmp_path: Path) -> None:
    name = board.check(None, "a: 1\n")
    folder = board.check_folder(name)
    assert folder.parent == tmp_path / "runs" / ".checks"
    assert (folder / "recipe.yaml").read_text() == "a: 1\n"
    assert board.runs.folders() == {}  # a check is no run
    for wrong in ("../x", "", "x"):
        with pytest.raises(RecipeError, match="there is no check"):
            board.check_folder(wrong)


def test_a_place_that_cannot_be_written(board: Board) -> None:
    board.runs.roots[0].write_text("a file")
    for start in (lambda: board.check(None, ""), lambda: board.start_run("one", None, "")):
        with pytest.raises(RecipeError, match="cannot be written"):
            start()


# --- access ----------------------------------------------------------------------------------------

TOKEN = "a-token-of-a-test"


@pytest.fixture
def client() -> TestClient:
    gate = TokenGate(PlainTextResponse("inside"), TOKEN, 8080)
    return TestClient(gate, base_url="http://127.0.0.1:8080", follow_redirects=False)


def test_without_the_token_every_path_is_401(client: TestClient) -> None:
    for path in ("/", "/new", "/?token=wrong", "/?token=", "/_nicegui/auto/static/x", "/files/report/0/x"):
        assert client.get(path).status_code == 401
        assert client.post(path).status_code == 401
    assert client.get("/", headers={"Cookie": "lit_ft_board_8080=wrong"}).status_code == 401
    assert client.get("/", headers={"Cookie": f"lit_ft_board_9090={TOKEN}"}).status_code == 401


def test_the_page_of_a_run_that_does_not_exist_is_404(board: Board, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    app = application(board, TOKEN, 8080)
    with TestClient(app, base_url="http://127.0.0.1:8080", headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        assert client.get("/run/0/a").status_code == 200
        answer = client.get("/run/0/b")
    assert answer.status_code == 404
    assert "there is no run" in answer.text


def test_the_token_of_the_address_becomes_a_cookie(client: TestClient) -> None:
    answer = client.get(f"/new?recipe=a.yaml&token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/new?recipe=a.yaml"
    outside = client.get(f"http://127.0.0.1:8080//evil.example/?token={TOKEN}")
    assert outside.headers["location"] == "/evil.example/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert client.get("/").text == "inside"
    assert client.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).text == "inside"


def test_pages_of_other_addresses_are_refused_even_with_the_cookie(client: TestClient) -> None:
    client.get(f"/?token={TOKEN}")
    for origin in ("http://evil.example", "http://127.0.0.1:9999", "null"):
        assert client.get("/", headers={"Origin": origin}).status_code == 403
    assert client.get("/", headers={"Origin": "http://127.0.0.1:8080"}).status_code == 200


def test_a_websocket_without_the_token_is_closed(client: TestClient) -> None:
    from starlette.websockets import WebSocketDisconnect

    for headers in ({}, {"Cookie": f"lit_ft_board_8080={TOKEN}", "Origin": "http://evil.example"}):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws", headers=headers):
            pass


@pytest.mark.parametrize("token", ["", "short", "with space", "ü" * 9, "semi;colon;;"])
def test_a_token_that_an_address_cannot_carry_is_refused(token: str) -> None:
    with pytest.raises(RecipeError, match=r"must have 8|--token gives no key"):
        command.run(["board", "--token", token])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["README.md"], "RUNS='README.md' is no folder"), (["--recipes", "nowhere"], "recipes='nowhere' is no folder")],
)
def test_folders_that_are_none_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        command.run(["board", *arguments])


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(RecipeError, match=re.escape("board needs the package psutil, which is not installed; pip in")):
        command.run(["board"])


# --- texts -----------------------------------------------------------------------------------------


def test_both_languages_have_all_texts_with_the_same_values_and_every_text_is_used() -> None:
    def values(text: str) -> list[str | None]:
        return [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]

    sources = "".join(path.read_text() for path in FOLDER.rglob("*.py") if path.name != "texts.py")
    for name, (english, chinese) in TEXTS.items():
        assert values(english) == values(chinese), name
        assert f'"{name}"' in sources or f"'{name}'" in sources or re.fullmatch(r"group \w+|\w+ ago", name), (
            f"{name} is not used"
        )
    assert set(re.findall(r"""texts\(["']([^"']+)["'][,)]""", sources)) <= set(TEXTS)


@pytest.mark.parametrize(
    ("cookies", "accepted", "language"),
    [
        ({}, "zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ({}, "de-DE,de;q=0.9,en;q=0.5", "en"),
        ({}, "", "en"),
        ({"lit_ft_language": "en"}, "zh-CN", "en"),
        ({"lit_ft_language": "xx"}, "zh", "zh"),
    ],
)
def test_the_language_is_the_chosen_one_or_the_browsers(cookies: dict[str, str], accepted: str, language: str) -> None:
    assert language_of(cookies, accepted) == language
    assert Texts(language)("of", 1, 2) == "1 / 2" if language == "zh" else "1 of 2"
