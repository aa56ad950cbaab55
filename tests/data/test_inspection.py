"""What ``check`` judges: truncated answers, placeholders, repeated rows, validation rows that are trained on."""

from collections import Counter
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from shared_fixtures import make_rows, make_tokenizer

from lit_ft import TextDataModule
from lit_ft.commands.check import show
from lit_ft.data.inspection import (
    Report,
    describe_lengths,
    inspect_split,
    judge_repetition,
    judge_truncation,
    show_example,
    whole_lengths,
)
from lit_ft.data.text.sources import Source
from lit_ft.data.tokens.preparation import Prepared
from lit_ft.data.tokens.samples import collect
from lit_ft.packed_batch import IGNORE_INDEX


def inspected(data: TextDataModule) -> Report:
    data.load(make_tokenizer())
    report = Report()
    for split, samples in data.splits.items():
        inspect_split(split, data.splits.prepared[split], samples, data.splits.preparation, report)
    judge_repetition(data.splits["train"], data.splits.get("val"), [], report, bool(data.val_fraction))
    return report


def prepared(truncated: int, lengths: list[int]) -> Prepared:
    arrays = collect(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))
    return Prepared(Source("a.json"), arrays, len(lengths), np.array(lengths), Counter(truncated=truncated))


def test_the_middle_of_a_long_sample_is_left_out_and_counted() -> None:
    ids = np.array(make_tokenizer()("the red book " * 1500)["input_ids"])
    labels = np.where(np.arange(len(ids)) < 1200, IGNORE_INDEX, ids)
    output = StringIO()
    report = Report(examples=[show_example(ids, labels, make_tokenizer())], titles=["sample 1"])
    show(report, Console(file=output, width=120))
    said = output.getvalue()
    left_out = len(ids) - 2000
    assert left_out > 200
    assert f"({left_out:,} of {len(ids):,} tokens are left out here, {left_out - 200:,} of them supervised)" in said
    assert said.count("»") == 2  # in the heading, and around the end


def test_the_max_length_that_keeps_samples_whole() -> None:
    assert whole_lengths(np.arange(1, 1001)) == "95% with 950, 99% with 990, 100% with 1,000"
    assert whole_lengths(np.array([7])) == "95% with 7, 99% with 7, 100% with 7"


def test_lengths_are_those_before_truncation(write_rows: Any) -> None:
    path = write_rows([{"instruction": "a", "output": "red " * n} for n in (1, 2, 3, 4, 50)])
    whole, cut = (TextDataModule(path, max_length=limit) for limit in (None, 20))
    for data in (whole, cut):
        data.load(make_tokenizer())
    longest = int(whole.splits["train"].lengths.max())
    (one,) = cut.splits.prepared["train"]
    assert one.full_lengths.tolist() == whole.splits["train"].lengths.tolist()
    assert cut.splits["train"].lengths.max() == 20
    facts = describe_lengths(cut.splits.prepared["train"], 20)
    middle = int(np.sort(whole.splits["train"].lengths)[2])
    assert facts["tokens per sample before truncation"] == f"half have up to {middle}, the longest {longest}"
    assert f"100% with {longest} (data.max_length is 20)" in facts["max_length that keeps samples whole"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "the cup is", "completion": " red"},
        {"prompt": [{"role": "user", "content": "the cup"}], "completion": [{"role": "assistant", "content": "red"}]},
    ],
)
def test_the_end_of_a_completion_is_looked_at(write_rows: Any, row: dict[str, Any]) -> None:
    report = inspected(TextDataModule(write_rows([row])))
    (source,) = report.sources["train"]
    assert (source.closed, source.ends) == (1.0, {"<|im_end|>": 1})


def test_a_few_truncated_answers_are_no_problem() -> None:
    assert judge_truncation("a", prepared(3, [9] * 100), 8) == []
    (problem,) = judge_truncation("a", prepared(4, [9] * 100), 8)
    assert problem.startswith("a: 4 of 100 answers truncated (4.0%; up to 3% is fine): data.max_length=8 is too")


def test_truncated_answers_are_a_problem(write_rows: Any) -> None:
    rows = [{"instruction": "a", "output": "red " * 60}] * 3 + make_rows(7)
    report = inspected(TextDataModule(write_rows(rows), max_length=64))
    assert any("rows: 3 of 10 answers truncated (30.0%" in line for line in report.problems)
    assert not any("truncated" in line for line in report.warnings)
    assert not inspected(TextDataModule(write_rows(rows), max_length=None)).problems


@pytest.mark.parametrize(("filled", "is_problem"), [(50, True), (300, False)])
def test_placeholders(write_rows: Any, filled: int, is_problem: bool) -> None:
    rows = [{"instruction": "a", "output": "I am {{name}}."}, *make_rows(filled)]
    report = inspected(TextDataModule(write_rows(rows)))
    problem = f"rows: 1 of {filled + 1} rows with placeholders that nobody filled in, e.g. {{{{name}}}} ("
    assert any(line.startswith(problem) for line in report.problems) == is_problem
    assert any(f"1 of {filled + 1} rows: holds placeholders" in line for line in report.warnings) != is_problem


def test_ends_are_the_last_supervised_tokens(write_rows: Any) -> None:
    roles = ("user", "assistant", "user", "assistant")
    rows: list[list[dict[str, Any]]] = [[{"role": role, "content": "red " * n} for role in roles] for n in (1, 9)]
    rows[1][3]["weight"] = 0  # so that many tokens come after the last that is supervised
    data = TextDataModule(write_rows([{"messages": turns} for turns in rows]), max_length=64)
    report = inspected(data)
    assert [source.ends for source in report.sources["train"]] == [{"<|im_end|>": 2}]
    (one,) = data.splits.prepared["train"]
    assert one.arrays.digests is one.arrays.digests  # a loop over all samples, which several callers need


def test_repeated_rows_are_counted_within_and_across_sources(write_rows: Any) -> None:
    rows = make_rows(10)
    sources = [
        Source(write_rows([*rows, rows[0], rows[0]], name="one.json")),
        Source(write_rows([*rows[:2], *make_rows(3, 5)], name="two.json")),
    ]
    report = inspected(TextDataModule(sources=sources))
    assert "one: 2 of 12 samples: repetition of another (16.7%; the most frequent is there 3 times)" in report.warnings
    assert "2 of 17 training samples repeat one of another source" in report.warnings


@pytest.mark.parametrize(("both", "is_problem"), [(0, False), (1, False), (2, True)])
def test_validation_rows_that_are_trained_on(write_rows: Any, both: int, is_problem: bool) -> None:
    rows = make_rows(30)
    own = make_rows(25, 5)[both:]
    val = write_rows([*rows[:both], *own], name="val.json")
    report = inspected(TextDataModule(write_rows(rows), val_path=val))
    line = f"{both} of 25 validation samples ({both / 25:.1%}) are in the training data too"
    assert any(one.startswith(line) for one in report.problems) == is_problem
    assert (line in report.warnings) == (both == 1)


def test_rows_that_repeat_parts_of_others_are_not_told_to_set_what_is_set(write_rows: Any) -> None:
    rows = [{"text": f"{n} red cups " + "on the table " * 120} for n in range(20)]
    report = inspected(TextDataModule(write_rows(rows), max_length=32, val_fraction=0.2))
    (problem,) = report.problems
    assert problem.endswith("learned by heart; remove from the data what its rows repeat, or set data.val_path")
