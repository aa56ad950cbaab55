import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_rows, make_tokenizer

from lit_ft import RecipeError, TextDataModule
from lit_ft.data.batching import BatchPlan, RowLoader, best_fit
from lit_ft.data.formats import to_conversations
from lit_ft.data.rendering import tokenize
from lit_ft.data.sources import read_rows
from lit_ft.rows import IGNORE_INDEX, from_padded, lay_end_to_end


def spelled(tokenizer: Any, row: dict[str, str], **options: Any) -> tuple[str, str]:
    """The text of a row, and of its supervised tokens."""
    ids, labels = tokenize(to_conversations([row], "rows.json", **options)[0], tokenizer)
    assert labels[labels != IGNORE_INDEX].tolist() == ids[labels != IGNORE_INDEX].tolist()
    return tokenizer.decode(ids), tokenizer.decode(labels[labels != IGNORE_INDEX])


def test_exact_labels_of_one_alpaca_row() -> None:
    tokenizer = make_tokenizer()
    row = {"instruction": "the cup", "input": "红", "output": "a book"}
    ids, labels = tokenize(to_conversations([row], "rows.json")[0], tokenizer)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def pieces(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    prompt = [start, *pieces("user\nthe cup\n红"), end, *pieces("\n"), start, *pieces("assistant\n")]
    answer = [*pieces("a book"), end]
    assert ids.tolist() == prompt + answer
    assert labels.tolist() == [IGNORE_INDEX] * len(prompt) + answer
    assert answer[-1] == tokenizer.eos_token_id == 2


def test_a_system_prompt_is_seen_and_not_learned() -> None:
    text, supervised = spelled(make_tokenizer(), {"instruction": "a", "output": "b"}, system="you are red")
    turns = ("system\nyou are red<|im_end|>\n", "user\na<|im_end|>\n", "assistant\nb<|im_end|>")
    assert text == "".join(f"<|im_start|>{turn}" for turn in turns)
    assert supervised == "b<|im_end|>"


def test_a_row_keeps_its_own_system_prompt() -> None:
    text, _ = spelled(make_tokenizer(), {"instruction": "a", "output": "b", "system": "mine"}, system="other")
    assert text.startswith("<|im_start|>system\nmine<|im_end|>")


def test_raw_text_is_supervised_to_its_end() -> None:
    text, supervised = spelled(make_tokenizer(), {"text": "the red book"})
    assert text == supervised == "the red book<|im_end|>"


def test_an_answer_that_spells_the_end_of_turn_is_kept_whole() -> None:
    _, supervised = spelled(make_tokenizer(), {"instruction": "a", "output": "write <|im_end|> here"})
    assert supervised == "write <|im_end|> here<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(RecipeError, match="rewrites earlier turns"):
        spelled(tokenizer, {"instruction": "a", "output": "b"})


BAD_FILES: dict[str, tuple[str, str]] = {
    "no list": ('{"instruction": "a"}', "holds a JSON dict; a list of objects is needed"),
    "no json": ('[{"a": 1},\n {"b" 2}]', "line 2, column 7: not JSON"),
    "empty": ("[]", "holds no rows"),
    "no object": ('[{"instruction": "a", "output": "b"}, 3]', "row 2: is a JSON int"),
    "no output": ('[{"instruction": "a", "output": "b"}, {"instruction": "a"}]', "row 2: has no 'output'"),
    "number": ('[{"instruction": "a", "output": 3}]', "row 1: 'output' is a int; text is needed"),
    "empty output": ('[{"instruction": "a", "output": ""}]', "row 1: 'output' is empty"),
    "empty question": ('[{"instruction": "", "output": "a"}]', "row 1: 'instruction' is empty"),
    "strange columns": ('[{"question": "a"}]', "row 1: has the columns 'question', which no format knows"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(RecipeError, match=message):
        to_conversations(read_rows(str(path)), str(path))


def test_json_lines_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instruction": "a", "output": "b"}\n\n{"instruction": "a" "output": "b"}\n')
    with pytest.raises(RecipeError, match="line 3: not JSON"):
        read_rows(str(path))


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes('[{"instruction": "红"}]'.encode("gbk"))
    with pytest.raises(RecipeError, match="is not UTF-8"):
        read_rows(str(path))


def load(write_rows: Callable[..., str], rows: Any = None, **options: Any) -> TextDataModule:
    data = TextDataModule(write_rows(rows), **options)
    data.load(make_tokenizer())
    return data


def test_too_long_rows_are_cut_and_counted(write_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    rows = [{"instruction": "a", "output": "red " * n} for n in (1, 50, 2)]
    data = load(write_rows, rows, max_length=40)
    assert data.splits["train"].samples.lengths.max() == 40
    assert "1 of 3 rows are longer than data.max_length=40 tokens and were cut at the end" in caplog.text


def test_a_row_whose_answer_is_cut_away_is_dropped_and_counted(
    write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    rows = [{"instruction": "a " * n, "output": "red"} for n in (1, 80)]
    data = load(write_rows, rows, max_length=40)
    assert len(data.splits["train"].samples) == len(data.splits["train"].conversations) == 1
    assert "1 of 2 rows had no supervised token left and were dropped" in caplog.text


def test_all_answers_cut_away(write_rows: Any) -> None:
    with pytest.raises(RecipeError, match=r"not one of 22 rows has a supervised token within data.max_length=6"):
        load(write_rows, max_length=6)


def test_too_long_rows_can_be_dropped_or_refused(write_rows: Any) -> None:
    rows = [{"instruction": "a", "output": "red " * n} for n in (1, 50, 2)]
    assert len(load(write_rows, rows, max_length=40, overlong="drop").splits["train"].samples) == 2
    with pytest.raises(RecipeError, match="row 2: .* tokens are over data.max_length=40"):
        load(write_rows, rows, max_length=40, overlong="error")


def test_a_tokenizer_without_template(write_rows: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RecipeError, match="has no chat template.*--data.chat_template"):
        TextDataModule(write_rows()).load(tokenizer)
    TextDataModule(write_rows(), chat_template="{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}").load(
        tokenizer
    )


def test_validation_share_does_not_overlap(write_rows: Any) -> None:
    rows = make_rows(50, seed=3)
    splits = load(write_rows, rows, val_fraction=0.2).splits
    train, val = ([json.dumps(c) for c in splits[name].conversations] for name in ("train", "val"))
    assert (len(train), len(val)) == (40, 10)
    assert sorted(train + val) == sorted(json.dumps(c) for c in to_conversations(rows, ""))


@pytest.mark.parametrize("packing", [None, 64])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("budget", [None, 64])
def test_every_sample_once_and_windows_agree(packing: Any, replicas: int, accumulate: int, budget: Any) -> None:
    rng = random.Random(0)
    lengths = [rng.randint(2, 30) for _ in range(47)]
    samples = _samples(lengths)
    plan = BatchPlan(2, packing, budget, shuffle=True, seed=1, replicas=replicas)
    loaders = [RowLoader(samples, plan, replica=r, accumulate=lambda: accumulate) for r in range(replicas)]
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        dealt = [loader.micro_batches() for loader in loaders]
        assert {len(micro_batches) for micro_batches in dealt} == {len(loaders[0])}
        members = [i for micro_batches in dealt for batch, _, _ in micro_batches for i in batch]
        assert sorted(members) == list(range(47))
        for start in range(0, len(loaders[0]), accumulate):
            window = [micro_batches[start : start + accumulate] for micro_batches in dealt]
            for share in window:
                supervised = sum(int(samples.supervised[batch].sum()) for batch, _, _ in share if batch)
                assert {tokens for _, tokens, _ in share} == {supervised}
            computes = [[compute for _, _, compute in share] for share in window]
            assert all(row == computes[0] for row in computes)  # all ranks skip the same micro-batches
            assert computes[0][-1]  # the one whose backward synchronises gradients is never skipped
        if budget is not None and packing is None:
            assert all(sum(lengths[i] for i in batch) <= budget for share in dealt for batch, _, _ in share)
        assert sum(len(list(loader)) for loader in loaders) == len(loaders[0]) * replicas


def _samples(lengths: list[int]) -> Any:
    from lit_ft.data.samples import collect

    return collect([(np.arange(3, 3 + n, dtype=np.int32), np.arange(3, 3 + n, dtype=np.int32)) for n in lengths])


def test_the_samples_of_a_step_do_not_depend_on_the_split() -> None:
    samples = _samples([5, 9, 4, 7, 8, 6, 3, 2, 5, 9, 4, 7])

    def steps(size: int, accumulate: int, replicas: int, budget: int | None) -> list[set[int]]:
        plan = BatchPlan(size, None, budget, shuffle=True, seed=5, replicas=replicas)
        dealt = [
            RowLoader(samples, plan, replica=r, accumulate=lambda: accumulate).micro_batches() for r in range(replicas)
        ]
        return [
            {i for share in dealt for batch, _, _ in share[start : start + accumulate] for i in batch}
            for start in range(0, len(dealt[0]), accumulate)
        ]

    wanted = steps(4, 1, 1, None)
    for split in ((1, 4, 1, None), (2, 2, 1, 18), (2, 1, 2, None), (1, 2, 2, 18), (1, 1, 4, None)):
        assert steps(*split) == wanted


def test_joined_micro_batches_keep_to_the_budget_and_come_last() -> None:
    samples = _samples([5, 5, 5, 5])
    loader = RowLoader(samples, BatchPlan(1, None, token_budget=10), accumulate=lambda: 4)
    assert [batch for batch, _, _ in loader.micro_batches()] == [[], [], [0, 1], [2, 3]]
    rows = list(loader)
    assert rows[0]["input_ids"].shape == (1, 0)
    assert rows[3]["segment_lengths"] == [5, 5]
    assert rows[3]["window_tokens"] == 16


def test_best_fit_packs_long_samples_by_length_and_short_ones_in_order() -> None:
    lengths = np.array([2, 4, 5, 1, 6, 3, 2])
    assert best_fit(lengths, 10, np.arange(7)) == [[4, 1], [2, 5, 0], [3, 6]]
    mixed = best_fit(np.array([4, 1, 4, 1, 4, 1]), 20, np.arange(6))
    assert mixed == [[0, 1, 2, 3, 4, 5]]


def test_packing_fills_rows(write_rows: Any) -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 0.8, 5000).astype(int).clip(5, 2048)
    bins = best_fit(lengths, 2048, np.random.default_rng(1).permutation(5000))
    assert lengths.sum() / (len(bins) * 2048) > 0.99
    assert sorted(i for members in bins for i in members) == list(range(5000))


def test_packing_that_cannot_hold_the_longest_sample(write_rows: Any) -> None:
    with pytest.raises(RecipeError, match="data.packing=20 tokens cannot hold the longest sample"):
        load(write_rows, packing=20)


def test_a_row_is_shifted_once_and_never_across_samples() -> None:
    first, second = np.array([3, 4, 5]), np.array([6, 7])
    row = lay_end_to_end([(first, first), (second, np.array([6, 7]))])
    assert row["input_ids"].tolist() == [[3, 4, 5, 6, 7]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert row["predict_at"].tolist() == [0, 1, 3]
    assert row["targets"].tolist() == [4, 5, 7]


def test_a_padded_batch_becomes_the_same_row() -> None:
    import torch

    ids = torch.tensor([[3, 4, 5], [0, 6, 7]])
    labels = torch.tensor([[3, 4, 5], [-100, 6, 7]])
    row = from_padded(ids, labels, torch.tensor([[1, 1, 1], [0, 1, 1]]))
    assert row["segment_lengths"] == [3, 2]
    assert row["targets"].tolist() == [4, 5, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.5}, "at least 0 and below 1"),
        ({"micro_batch_size": 0}, "must be 1 or more"),
        ({"packing": True}, "says no size; give the token budget"),
        ({"val_path": "x", "val_fraction": 0.1}, "exclude each other"),
    ],
)
def test_options_that_make_no_sense(options: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        TextDataModule("rows.json", **options)
