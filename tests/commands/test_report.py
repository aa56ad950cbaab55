"""``report``, and the page that ``fit`` writes."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from command_line import clean_environment, recipe, run  # noqa: F401 (the fixture holds here too)
from forked_commands import run_forked
from shared_fixtures import make_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "rows.json").write_text(json.dumps(make_rows(8)))
    answers = {
        "class_path": "lit_callbacks.SampleGenerations",
        "init_args": {"prompts": ["Hello"], "max_new_tokens": 3},
    }
    arguments = recipe(folder, model_folder, str(folder / "rows.json"), max_steps=4, callbacks=[answers])
    done = run_forked(*arguments, "--run_dir", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    assert f"report: {folder / 'run' / 'report.html'}" in done.stdout + done.stderr
    return folder / "run"


def test_fit_leaves_a_page(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert 'aria-label="loss"' in page
    assert "<pre>Hello</pre>" in page
    assert "<h3>step 0</h3>" in page
    assert "<h3>step 4</h3>" in page
    assert "First batch, as the model sees it" in page
    assert '<mark class="special">&lt;|im_end|&gt;</mark>' in page
    assert "class_path: lit_ft.CausalLM" in page
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["optimizer_steps"] == 4
    assert {"torch", "lightning", "lit-ft", "transformers", "peft"} <= set(environment["versions"])


def test_report_writes_it_again_and_elsewhere(
    finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = (finished / "report.html").read_text()
    (finished / "report.html").unlink()
    run(capsys, "report", str(finished))
    assert (finished / "report.html").read_text() == whole
    run(capsys, "report", str(finished), "--out", str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text() == whole


def test_a_page_that_cannot_be_written_leaves_the_earlier_one(finished: Path, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("the earlier one")
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))  # what the kernel does at a quota
    try:
        said = run(capsys, "report", str(finished), "--out", str(tmp_path / "link.html"), code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the page cannot be written ([Errno 27] File too large)" in said
    assert (tmp_path / "page.html").read_text() == "the earlier one"
    run(capsys, "report", str(finished), "--out", str(tmp_path / "link.html"))
    assert (tmp_path / "link.html").is_symlink()
    assert "the earlier one" not in (tmp_path / "page.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "run='nowhere' holds no run (no config.yaml there); name the folder that fit wrote"),
        (["RUN", "--out", "RUN/missing/page.html"], "the page cannot be written ([Errno 2]"),
        (["RUN", "--out", "/proc/page.html"], "error: out='/proc/page.html' cannot be written (No such file"),
    ],
)
def test_what_is_wrong_is_said(finished: Path, capsys: Any, arguments: list[str], said: str) -> None:
    assert said in run(capsys, "report", *(one.replace("RUN", str(finished)) for one in arguments), code=2)
