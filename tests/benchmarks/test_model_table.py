"""Packed batches of every architecture that transformers has a causal LM for, compared with single samples."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import model_table
from benchmarks.model_comparison import (
    ARCHITECTURES,
    HEADINGS,
    YES,
    Results,
    Row,
    Tiny,
    _without_rounding,
    compare,
    one_by_one,
)
from benchmarks.model_table import ResultsFile, markdown, rows_in
from benchmarks.support_tables import END
from benchmarks.tiny_configs import tiny_config
from lit_ft.model.isolation.architectures import COMPARED, REFUSED

NAMES = sorted(COMPARED & set(ARCHITECTURES))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_batch_equals_its_samples(name: str) -> None:
    row = compare(name, frozenset({"lora", "merge", "checkpointing"}))
    assert row.packed == YES
    assert row.lora.startswith(YES)
    assert row.merge == YES
    assert row.checkpointing in (YES, "transformers does not support it")


def test_every_architecture_is_compared_or_refused_with_a_reason() -> None:
    assert set(ARCHITECTURES) <= COMPARED | set(REFUSED)
    assert not COMPARED & set(REFUSED)


def test_a_difference_is_seen() -> None:
    one = Results(torch.tensor([[2.0, 4.0]]), 3.0, {"a": torch.tensor([1.0, 100.0]), "b": torch.tensor([1e-9])})
    assert one.difference(one) == 0.0
    assert replace(one, logits=torch.tensor([[2.0, 4.5]])).difference(one) == pytest.approx(0.125)
    assert replace(one, gradients={**one.gradients, "a": torch.tensor([2.0, 100.0])}).difference(one) == 0.01
    assert replace(one, gradients={**one.gradients, "b": torch.tensor([2e-9])}).difference(one) < 1e-8


def test_reasons_are_listed_below_the_table() -> None:
    rows = {"a": Row(packed=YES, mixing="packed attention", lora="yes, 7"), "b": Row(packed="has no end")}
    a, b = markdown(rows).splitlines()[2:4]
    assert a.startswith("| `a` | yes | packed attention | yes, 7 | not run |")
    assert b.startswith("| `b` | no (1) |  |  |")
    assert "1. has no end" in markdown(rows)
    rows = {"a": Row(packed=YES, tensor="yes; LoRA: no", pipeline="has no end")}
    assert "| yes (1) | no (2) |" in markdown(rows)
    assert rows_in(markdown(rows)) == rows


def test_rows_that_are_named_are_written_among_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_table, "DOCS", tmp_path)
    rows = {name: Row(packed=YES, lora=lora) for name, lora in {"bart": "no A", "bert": "no B"}.items()}
    page = tmp_path / "models.md"
    page.write_text(f"# Models\n{model_table.BEGIN}\n{markdown(rows)}\n{END}after\n")
    assert rows_in(page.read_text()) == rows
    model_table.main(["bart"])
    assert rows_in(page.read_text()) == rows
    model_table.main(["bart", "--write"])
    assert rows_in(page.read_text()) == {"bart": Row(packed=REFUSED["bart"]), "bert": rows["bert"]}
    assert page.read_text().endswith("after\n")


def test_rounding_is_told_from_a_difference_by_double_precision() -> None:
    tiny = Tiny(tiny_config("glm"))
    model = tiny.reference()
    assert tiny.packed().difference(one_by_one(model)) > 1e-9
    assert _without_rounding(tiny, model) < 1e-6
    tiny.model.lm_head.weight.data[0, 0] += 1.0
    assert _without_rounding(tiny, model) > 1e-3


def test_a_results_file_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file, command = tmp_path / "rows.jsonl", ["bart", "blenderbot", "--results", str(tmp_path / "rows.jsonl")]
    model_table.main(command)
    table = capsys.readouterr().out.split("| `bart`")[1]
    file.write_text(file.read_text()[:-9])  # killed while it wrote the second row
    found: list[str] = []
    monkeypatch.setattr(model_table, "compare", lambda name, _: found.append(name) or compare(name))
    model_table.main(command)
    assert found == ["blenderbot"]
    assert capsys.readouterr().out.split("| `bart`")[1] == table
    assert ResultsFile(file, frozenset(HEADINGS)).rows.keys() == {"bart", "blenderbot"}
    assert not ResultsFile(file, frozenset(HEADINGS) - {"compile"}).rows  # found with another set of columns
