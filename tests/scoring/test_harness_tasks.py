"""Tasks that cannot be run are refused with what to do, before any weights are loaded."""

import json
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import run

pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")

from datasets import config
from huggingface_hub import constants
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from lit_ft.commands.inference.evaluate import run as evaluate
from lit_ft.errors import RecipeError
from lit_ft.scoring.harness_tasks import load_tasks

pytestmark = pytest.mark.slow
TASK = """\
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"question": "red", "answer": "blue"}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(TASK.replace("ROWS", str(tmp_path / "rows.jsonl")))
    return path


def refused(*names: object, manager: Any = None) -> str:
    with pytest.raises(RecipeError) as refusal:
        load_tasks([str(name) for name in names], manager)
    return str(refusal.value)


def test_a_local_task_is_read_without_a_network(task: Path) -> None:
    (found,) = load_tasks([str(task)])
    assert found.doc_to_text(found.dataset["test"][0]) == "red"


def test_a_name_that_is_unknown_has_close_ones(task: Path) -> None:
    manager = TaskManager(include_path=task.parent, include_defaults=False)
    assert [one.task_name for one in load_tasks(["mine"], manager)] == ["mine"]
    assert "did you mean mine?" in refused("mina", manager=manager)
    assert "`lm_eval ls tasks` lists them" in refused("zzzzzz", manager=manager)
    assert "'mine' twice" in refused("mine", task, manager=manager)


def test_files_that_are_missing_or_damaged(task: Path) -> None:
    assert "there is no such file" in refused(task.with_name("other.yaml"))
    text = task.read_text()
    task.write_text("task: [")
    assert "is no YAML" in refused(task)
    task.write_text("- a list")
    assert "must be a mapping" in refused(task)
    task.write_text("group: several\ntask: [hellaswag, winogrande]")
    assert "is a group of tasks" in refused(task)
    task.write_text(text + "include: mine.yaml\n")
    assert "includes itself" in refused(task)
    task.write_text(text.replace("rows.jsonl", "gone.jsonl"))
    assert "cannot be read (FileNotFoundError" in refused(task)


def test_data_of_the_hub_is_refused_without_a_network(task: Path) -> None:
    task.write_text(task.read_text().replace("dataset_path: json", "dataset_path: someone/something"))
    message = refused(task)
    assert "'someone/something' of the Hugging Face hub, which cannot be had" in message
    assert "YAML file over local data" in message


def test_a_hub_that_cannot_be_reached_is_asked_once(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def refuse() -> None:
        nonlocal asked
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return
            asked += 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for module, endpoint in ((constants, "ENDPOINT"), (config, "HF_ENDPOINT")):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
            monkeypatch.setattr(module, endpoint, address)
        thread = threading.Thread(target=refuse)
        thread.start()
        task.write_text(task.read_text().replace("dataset_path: json", "dataset_path: someone/something"))
        assert "'someone/something' of the Hugging Face hub, which cannot be had" in refused(task)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert asked == 1


def test_code_runs_only_where_the_user_allows_it(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (task.parent / "mycode.py").write_text("def text(row):\n    return row['question'] + '!'\n")
    text = task.read_text()
    task.write_text(text.replace('"{{question}}"', "!function mycode.text"))
    assert "--allow_code mycode" in refused(task)
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "mycode")
    (found,) = load_tasks([str(task)])
    assert found.doc_to_text(found.dataset["test"][0]) == "red!"
    task.write_text(text.replace("exact_match", "someone/metric"))
    assert "--allow_code evaluate" in refused(task)


@pytest.mark.parametrize(
    "function",
    [
        '!function "harm.text"',
        "!function 'harm.text'",
        "!<!function> harm.text",
        "!function &x harm.text",
        "&x !function harm.text",
        "!function >-\n  harm.text",
        "!function {=: harm.text}",
    ],
)
def test_code_is_refused_however_the_file_spells_it(task: Path, function: str) -> None:
    (task.parent / "harm.py").write_text("raise SystemExit('code has run')\n")
    task.write_text(task.read_text().replace('"{{question}}"', function))
    assert "--allow_code harm" in refused(task)
    including = task.with_name("including.yaml")
    including.write_text("include: mine.yaml\n")
    assert "--allow_code harm" in refused(including)


def test_templates_run_in_a_sandbox(task: Path) -> None:
    task.write_text(task.read_text().replace("{{question}}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    assert "SecurityError" in refused(task)


def test_the_extra_is_named_where_it_is_missing(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install -e '.[evaluate]'" in refused(task)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to evaluate"),
        (["--tasks", "x.yaml", "--limit", "0"], "limit=0 must be"),
        (["--tasks", "x.yaml", "--limit", "1.5"], "limit=1.5 must be"),
        (["--tasks", "x.yaml", "--num_fewshot", "-1"], "num_fewshot=-1 must be"),
        (["--tasks", "x.yaml"], "there is no such file"),
        (["--questions", "q.json"], "belong together"),
        (["--data.path", "gone.json", "--url", "http://127.0.0.1:9"], "--url runs --tasks"),
        (["--data.path", "gone.json"], "gone.json"),
        (
            ["--data.path", "gone.json", "--data.format", "preference"],
            "pairs of answers, and evaluate scores single ones",
        ),
        (["--data.path", "gone.json", "--api", "chat"], "--api is for --url, which is not given"),
        (["--data.path", "gone.json", "--limit", "5"], "--limit is for --tasks, which is not given"),
        (["--tasks", "x.yaml", "--max_new_tokens", "9"], "--max_new_tokens is for --data.path or --questions, which"),
        (["--tasks", "x.yaml", "--data.system", "Hi"], "--data.system is for --data.path or --questions, which"),
        (["--questions", "gone.json", "--judge_url", "http://127.0.0.1:9"], "does not answer"),
        (["--data.path", "gone.json", "--no_base", "--against", "other"], "--no_base leaves nothing"),
    ],
)
def test_bad_options(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: str, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run(capsys, "evaluate", model_folder, *options, code=2)
    assert not list((tmp_path / "checkpoints").rglob("1"))  # no empty folder is left


def test_a_template_that_is_not_there_is_said_before_weights_are_read(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: str, task: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("given", "other"):
        shutil.copytree(model_folder, name, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoTokenizer.from_pretrained(model_folder, chat_template="").save_pretrained("other")
    options = ("--tasks", str(task), "--apply_chat_template", "true", "--against", "other")
    said = run(capsys, "evaluate", "given", *options, code=2)
    assert "apply_chat_template=true, but the tokenizer of other has no chat template; give one" in said


def test_a_row_that_cannot_be_read_is_to_be_corrected(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"instruction": "a lamp"}\n')
    said = run(capsys, "evaluate", model_folder, "--data.path", "rows.jsonl", code=2)
    assert said.endswith("(columns here: 'instruction'); correct the row, or remove it\n")


def test_raw_text_has_no_exact_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a lamp"}\n')
    evaluate(["evaluate", model_folder, "--data.path", "rows.jsonl", "--no_base", "--out", "scores"])
    table = json.loads(Path("scores/1/scores.json").read_text())
    assert [row[1] for row in table["rows"]] == ["loss", "perplexity", "token_accuracy"]
    assert "rows.jsonl: no row is a conversation, so there is no exact match, rouge or bleu" in table["notes"]


def test_a_run_without_a_checkpoint(capsys: Any, tmp_path: Path, model_folder: str, task: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: {}\ndata: {}\ntrainer: {}\nseed_everything: 1\n")
    errors = run(capsys, "evaluate", str(tmp_path / "run"), "--tasks", str(task), code=2)
    assert "there is no checkpoint" in errors
