"""docs/python.md: each block of code runs, in order, and the notebook has the same cells."""

import json
import os
import pydoc
from pathlib import Path
from typing import Any

import pytest
from model_folders import shallow

import lit_ft
from benchmarks.notebook import PAGE, blocks, notebook
from lit_ft import CausalLM

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = PAGE.parents[1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(repository / "recipes")
    (tmp_path / "checkpoints").mkdir()
    shallow(repository / "checkpoints" / "tiny-qwen2", tmp_path / "checkpoints" / "tiny-qwen2", layers=2)
    names: dict[str, Any] = {"__name__": "page"}
    try:
        for number, block in enumerate(blocks(TEXT)):
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    finally:
        os.environ.pop("PL_GLOBAL_SEED", None)
    assert float(names["trainer"].callback_metrics["val/loss"]) < 3
    assert names["longer"].global_step == 50
    merged, again = (dict(names[name].named_parameters()) for name in ("merged", "again"))
    assert all((merged[name] - again[name]).abs().max() < 1e-5 for name in merged)
    assert isinstance(names["smoothed"], CausalLM)
    assert float(names["learner"].callback_metrics["val/reward_accuracy"]) > 0
    assert names["results"][3e-3] < names["results"][1e-3]


def test_training_takes_twenty_lines() -> None:
    assert sum(bool(line) for line in blocks(TEXT)[0].splitlines()) <= 20


def test_the_notebook_is_the_page() -> None:
    written = PAGE.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert written == notebook(TEXT), "run python -m benchmarks.notebook"
    code = ["".join(cell["source"]) for cell in json.loads(written)["cells"] if cell["cell_type"] == "code"]
    assert code[1:] == blocks(TEXT)


def test_help_shows_the_public_names_with_an_example() -> None:
    text = pydoc.plain(pydoc.render_doc(lit_ft))
    assert "Trainer(max_epochs=3).fit(model, data)" in text
    assert all(name in text.split("PACKAGE CONTENTS")[0] for name in lit_ft.__all__)
    assert set(lit_ft.__all__) <= set(dir(lit_ft))
