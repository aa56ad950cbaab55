"""Rows of preference data: the shapes that other trainers have, what is refused, and what the pairs become."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_fixtures import make_tokenizer

from lit_ft import RecipeError, Source, TextDataModule
from lit_ft.data.loaders.mixing import Mixing
from lit_ft.data.loaders.order import order_of_samples
from lit_ft.data.questions import questions_of
from lit_ft.data.text.formats import FORMATS, Chat, Pair, Text
from lit_ft.data.tokens.preparation import Preparation
from lit_ft.data.tokens.samples import Samples, collect, join
from lit_ft.errors import BadRow
from lit_ft.packed_batch import pack_pairs, sample_targets, split


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def share(name: str, value: str) -> dict[str, str]:
    return {"from": name, "value": value}


ASK, GOOD, BAD = turn("user", "the red book"), turn("assistant", "cup"), turn("assistant", "lamp")
EARLIER = [turn("user", "a"), turn("assistant", "cup"), turn("user", "the")]
ANSWERS = {"chosen": GOOD, "rejected": BAD}
CHATS = Pair(Chat([ASK, GOOD]), Chat([ASK, BAD]))
SHAPES: dict[str, tuple[dict[str, Any], Pair]] = {
    "bare texts": ({"prompt": "a", "chosen": " cup", "rejected": " lamp"}, Pair(Text(" cup", "a"), Text(" lamp", "a"))),
    "messages": ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, CHATS),
    "one message each": ({"prompt": [ASK], **ANSWERS}, CHATS),
    "answers as texts": ({"prompt": [ASK], "chosen": "cup", "rejected": "lamp"}, CHATS),
    "whole conversations": ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, CHATS),
    "UltraFeedback": (
        {"prompt": "the red book", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "messages": [ASK, GOOD]},
        CHATS,
    ),
    "alpaca": ({"instruction": "the red book", "input": "", "chosen": "cup", "rejected": "lamp"}, CHATS),
    "sharegpt": (
        {
            "conversations": [share("human", "the red book")],
            "chosen": share("gpt", "cup"),
            "rejected": share("gpt", "lamp"),
        },
        CHATS,
    ),
    "sharegpt, whole": (
        {
            "chosen": [share("human", "the red book"), share("gpt", "cup")],
            "rejected": [share("human", "the red book"), share("gpt", "lamp")],
        },
        CHATS,
    ),
    "Axolotl": ({"messages": [ASK], **ANSWERS}, CHATS),
    "messages as JSON": ({"messages": json.dumps([ASK]), **ANSWERS}, CHATS),
    "ms-swift": ({"messages": [ASK, GOOD], "rejected_response": "lamp"}, CHATS),
    "an earlier answer": (
        {"prompt": EARLIER, **ANSWERS},
        Pair(Chat([*EARLIER, GOOD], marks={1: False}), Chat([*EARLIER, BAD], marks={1: False})),
    ),
    "an earlier answer of whole conversations": (
        {"chosen": [*EARLIER, GOOD], "rejected": [*EARLIER, BAD]},
        Pair(Chat([*EARLIER, GOOD], marks={1: False}), Chat([*EARLIER, BAD], marks={1: False})),
    ),
    "alpaca with history": (
        {"instruction": "the", "history": [["a", "cup"]], "chosen": "cup", "rejected": "lamp"},
        Pair(Chat([*EARLIER, GOOD], marks={1: False}), Chat([*EARLIER, BAD], marks={1: False})),
    ),
    "a marked question": ({"prompt": [{**ASK, "train": True}], **ANSWERS}, CHATS),
    "system and tools": (
        {"prompt": [ASK], **ANSWERS, "system": "s", "tools": [{"name": "add"}]},
        Pair(
            *(
                Chat([turn("system", "s"), ASK, one], [{"type": "function", "function": {"name": "add"}}])
                for one in (GOOD, BAD)
            )
        ),
    ),
    "answers of several turns": (
        {"prompt": [ASK], "chosen": [GOOD, ASK, GOOD], "rejected": [BAD]},
        Pair(Chat([ASK, GOOD, ASK, GOOD]), Chat([ASK, BAD])),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_rows(name: str) -> None:
    row, wanted = SHAPES[name]
    pair = FORMATS["preference"].read(row)
    assert isinstance(pair, Pair)
    assert (pair.chosen, pair.rejected) == (wanted.chosen, wanted.rejected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are equal"),
        ({"prompt": [ASK], "chosen": GOOD, "rejected": GOOD}, "'chosen' and 'rejected' are equal"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "'chosen' and 'rejected' are equal"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "one of 'chosen' and 'rejected' is the beginning of the other"),
        ({"chosen": [ASK, GOOD], "rejected": EARLIER}, "no turn in common"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, "no turn in common"),
        (
            {"chosen": [ASK, GOOD, ASK], "rejected": [ASK, GOOD, turn("user", "x"), BAD]},
            "'chosen' has a turn of role 'user' after the prompt",
        ),
        ({"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "'chosen' has a turn of role 'user' after"),
        ({"prompt": [ASK], "chosen": [3], "rejected": [BAD]}, "'chosen' has a turn that is an int after the prompt"),
        ({"prompt": "x", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "'prompt' is not the first question"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": " \n"}, "'rejected' is empty"),
        ({"prompt": [ASK], "chosen": [], "rejected": [BAD]}, "'chosen' is empty"),
        ({"prompt": [ASK], "chosen": turn("assistant", ""), "rejected": BAD}, "prompt and chosen.*'content' is empty"),
        ({"chosen": "Human: a Assistant: b", "rejected": "Human: a Assistant: c"}, "are texts without a prompt"),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "map that, e.g. --data.columns '{instruction: question}'"),
        ({"prompt": "a", "chosen": "b"}, r"has no 'rejected'.*columns here: 'prompt', 'chosen'"),
        ({"prompt": "a", "completion": "b"}, "has no 'chosen'"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "'chosen' is of type int"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "are of two kinds"),
        ({"messages": [ASK, GOOD], **ANSWERS}, "two assistant turns follow each other"),
        ({"messages": [], "rejected_response": "b"}, "has no 'chosen'"),
        ({"prompt": [ASK], **ANSWERS, "images": ["a.png"]}, "has 'images'"),
    ],
)
def test_rows_that_are_no_pairs(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        FORMATS["preference"].read(row)


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
JUDGED: dict[str, tuple[dict[str, Any], Pair]] = {
    "TRL, texts": ({"prompt": "a", "completion": " cup", "label": True}, Pair(Text(" cup", "a"), None)),
    "TRL, messages": ({"prompt": [ASK], "completion": [BAD], "label": False}, Pair(None, Chat([ASK, BAD]))),
    "ms-swift": ({"messages": [*EARLIER, GOOD], "label": 1}, Pair(Chat([*EARLIER, GOOD], marks={1: False}), None)),
    "LLaMA-Factory": (
        {"conversations": [share("human", "the red book"), share("gpt", "lamp")], "kto_tag": False},
        Pair(None, Chat([ASK, BAD])),
    ),
    "alpaca in a table": (
        {"instruction": "the red book", "input": "", "output": "cup", "kto_tag": "True"},
        Pair(Chat([ASK, GOOD]), None),
    ),
    "a call of a tool in the answer": (
        {"messages": [*EARLIER, turn("assistant", "", tool_calls=CALLS), turn("tool", "x"), GOOD], "label": "0"},
        Pair(
            None,
            Chat([*EARLIER, turn("assistant", "", tool_calls=CALLS), turn("tool", "x"), GOOD], marks={1: False}),
        ),
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_shapes_of_judged_answers(name: str) -> None:
    row, wanted = JUDGED[name]
    pair = FORMATS["unpaired_preference"].read(row)
    assert (pair.chosen, pair.rejected) == (wanted.chosen, wanted.rejected)
    assert row.keys() <= pair.columns


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, r"has no 'label', which .* \(columns here: 'prompt', 'completion'\)"),
        ({"prompt": "a", "completion": "b", "label": 2}, "'label' is 2; true or 1 is needed for a good answer, false"),
        (
            {"prompt": "a", "completion": "b", "label": None, "kto_tag": "yes"},
            "'kto_tag' is 'yes'; true or 1 is",
        ),
        ({"prompt": "a", "label": True}, r"has no answer that 'label' could judge; give .* \(columns here: 'prompt'\)"),
        ({"messages": [ASK, GOOD, ASK], "label": True}, "ends without an answer that 'label' could judge"),
        ({"prompt": "", "completion": "b", "label": True}, "'prompt' is empty"),
        ({"prompt": "a", "completion": "", "label": True}, "'completion' is empty"),
    ],
)
def test_rows_that_judge_nothing(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        FORMATS["unpaired_preference"].read(row)


# --- samples -----------------------------------------------------------------------------------------


def load(write_rows: Any, rows: list[dict[str, Any]], **options: Any) -> TextDataModule:
    data = TextDataModule(write_rows(rows), format="preference", **options)
    data.load(make_tokenizer())
    return data


def texts(samples: Samples, index: int) -> list[tuple[str, str]]:
    """Text of each conversation of a pair, and its supervised part."""
    tokenizer = make_tokenizer()
    return [(tokenizer.decode(ids), tokenizer.decode(labels[labels >= 0])) for ids, labels in samples.pair(index)]


def pair_of(chosen: int, rejected: int, prompt: int = 1) -> dict[str, Any]:
    """A row with answers, and a prompt, of some numbers of words."""
    return {"instruction": "a " * prompt, "chosen": "cup " * chosen, "rejected": "lamp " * rejected}


def test_a_pair_is_one_sample(write_rows: Any) -> None:
    rows = [SHAPES["an earlier answer"][0], SHAPES["bare texts"][0]]
    for _ in range(2):  # the second time from the cache
        data = load(write_rows, rows)
        samples = data.splits["train"]
        assert (len(samples), samples.rows.tolist(), samples.has_pairs, data.has_pairs) == (2, [0, 1], True, True)
        end = "<|im_end|>"
        assert [part for _, part in texts(samples, 0)] == [f"cup{end}", f"lamp{end}"]
        assert texts(samples, 1) == [(f"a cup{end}", f" cup{end}"), (f"a lamp{end}", f" lamp{end}")]
        halves = [samples.pair(i) for i in range(2)]
        assert samples.lengths.tolist() == [sum(len(ids) for ids, _ in pair) for pair in halves]
        assert samples.supervised.tolist() == [sum(int((labels >= 0).sum()) for _, labels in pair) for pair in halves]
        assert samples.longest == max(len(ids) for pair in halves for ids, _ in pair)
    other = TextDataModule(write_rows([{"text": "a cup"}], "text.json"))
    other.load(make_tokenizer())
    assert not other.has_pairs
    assert not other.splits["train"].has_pairs


def test_the_first_token_of_neither_conversation_is_a_target(write_rows: Any) -> None:
    rows = [{"prompt": "a", "chosen": " cup", "rejected": " lamp"}]
    samples = load(write_rows, rows).splits["train"]
    (chosen, _), (rejected, _) = samples.pair(0)
    assert samples.supervised.sum() == len(chosen) + len(rejected) - 2


@pytest.mark.parametrize(
    ("overlong", "rows", "kept", "said"),
    [
        ("truncate", [(1, 50), (50, 1), (1, 1)], [0, 1, 2], ["2 of the answers of 3 rows: longer than"]),
        ("drop", [(1, 50), (50, 50), (1, 1)], [2], ["3 of the answers of 3 rows: longer than", "2 of 3 rows: one of"]),
        ("truncate_left_prompt", [(1, 2, 60), (1, 2)], [0, 1], ["2 of the answers of 2 rows: .*without the beginning"]),
        (
            "truncate",
            [(1, 2, 60), (1, 2)],
            [1],
            ["2 of the answers of 2 rows: no supervised token left", "1 of 2 rows: one of its answers"],
        ),
    ],
)
def test_each_conversation_has_its_length(
    overlong: Any, rows: Any, kept: Any, said: Any, write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    data = load(write_rows, [pair_of(*row) for row in rows], max_length=40, overlong=overlong)
    assert data.splits["train"].rows.tolist() == kept
    assert data.splits["train"].longest <= 40
    for line in said:
        assert re.search(line, caplog.text), caplog.text
    assert data.splits.prepared["train"][0].rows == len(rows)


def test_long_pairs_as_an_error_are_counted_once(write_rows: Any) -> None:
    with pytest.raises(RecipeError, match=r"row 2: \d+ tokens are over data.max_length=40 \(1 such rows among these 2"):
        load(write_rows, [pair_of(1, 2), pair_of(50, 60)], max_length=40, overlong="error")


def test_answers_that_truncation_makes_equal_are_left_out(write_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    long = {"instruction": "a", "chosen": "cup " * 50 + "a", "rejected": "cup " * 50 + "the"}
    data = load(write_rows, [long, pair_of(1, 1)], max_length=40)
    assert data.splits["train"].rows.tolist() == [1]
    assert "1 of 2 rows: both answers have the same tokens within data.max_length=40" in caplog.text


def test_bad_rows_are_skipped_and_counted_as_rows(write_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    rows = [pair_of(1, 1), {**pair_of(1, 1), "rejected": "\ud800"}, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    path = Path(write_rows([]))
    path.write_text(json.dumps(rows))
    data = TextDataModule(str(path), format="preference", on_bad_row="skip")
    data.load(make_tokenizer())
    assert data.splits["train"].rows.tolist() == [0]
    assert "2 of 3 rows cannot be used, skipped" in caplog.text
    assert "row 2: 'rejected': its text holds half of a surrogate pair" in caplog.text
    assert "was left out" not in caplog.text


def test_notes_count_a_pair_once(write_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    row = {"prompt": [turn("user", "{{name}}", more=1)], **ANSWERS, "score": 3}
    load(write_rows, [row])
    assert "1 of 1 row: holds placeholders" in caplog.text
    assert "columns that the model does not see: 'score' (in 1 row)" in caplog.text
    assert re.search(r"keys of turns that .* does not use: 'more' \(in 1 row\)", caplog.text)


def test_a_prompt_that_is_not_read_is_said(write_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    load(write_rows, [SHAPES["UltraFeedback"][0]])
    assert "columns that the model does not see: 'messages' (in 1 row)" in caplog.text


def test_a_template_that_rewrites_answers(write_rows: Any) -> None:
    """An answer of several turns must be one sample."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if not loop.last and m.role == 'assistant' %}-{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    load(write_rows, [{"prompt": EARLIER, **ANSWERS}], chat_template=template)
    row, _ = SHAPES["answers of several turns"]
    with pytest.raises(RecipeError, match="row 1: 'chosen': .*writes its earlier answers otherwise than the last"):
        load(write_rows, [row], chat_template=template)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"supervise": "last"}, "data.supervise='last' has no effect on preference data"),
        ({"streaming": True}, "data.streaming=true reads no preference data"),
        ({"val_sources": [Source("v.json", format="alpaca")]}, "'v.json' is read as alpaca; training, validation and"),
    ],
)
def test_options_that_pairs_cannot_follow(options: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        TextDataModule("rows.json", format="preference", **options)


def test_indexed_data_holds_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.idx").touch()
    with pytest.raises(RecipeError, match="is indexed data, which holds no preferences"):
        TextDataModule(str(tmp_path / "a.bin"), format="preference")


@pytest.mark.parametrize("mixed", ["train", "val", "test"])
def test_pairs_beside_other_data(mixed: str) -> None:
    pairs, other = Source("pairs.json", format="preference"), Source("other.json")
    given: dict[str, Any] = {
        "train": {"sources": [pairs, other]},
        "val": {"sources": [pairs], "val_sources": [other]},
        "test": {"sources": [pairs], "test_path": "other.json"},
    }
    with pytest.raises(RecipeError, match="'pairs.json' holds preference data .* 'other.json' is read as auto"):
        TextDataModule(**given[mixed])
    with pytest.raises(RecipeError, match="'pairs.json' holds preference data"):
        TextDataModule("other.json", val_sources=[pairs])


def test_packing_and_the_token_budget_count_both_answers(write_rows: Any) -> None:
    rows = [pair_of(n, 2 * n) for n in range(1, 9)]
    assert TextDataModule("a.json", format="preference", max_length=64, micro_batch_size=3).token_budget == 384
    assert TextDataModule("a.json", format="preference", packing=64, micro_batch_size=3).token_budget == 192
    longest = int(load(write_rows, rows).splits["train"].lengths.max())
    load(write_rows, rows, packing=longest)
    limit = (longest - 1) // 2
    with pytest.raises(RecipeError, match=rf"longest pair of {longest}; .*or data.max_length to {limit}$"):
        load(write_rows, rows, packing=longest - 1)


def test_hold_out_and_several_sources(write_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    one, two = ([pair_of(n, n + k, n) for n in range(1, 9)] for k in (1, 2))
    sources = [Source(write_rows(rows, f"{k}.json"), format="preference") for k, rows in enumerate((one, two))]
    data = TextDataModule(sources=sources, val_fraction=0.25)
    data.load(make_tokenizer())
    train, val = data.splits["train"], data.splits["val"]
    assert (len(train), len(val), train.has_pairs, val.has_pairs) == (12, 4, True, True)
    assert val.rows[:2].tolist() == val.rows[2:].tolist()  # of the same prompts
    assert "4 of these 4 rows answer prompts of several sources, which are held out of each" in caplog.text
    held_out = zip(val.sources_of(range(4)), val.rows.tolist(), strict=True)
    kept = {tuple(name.split(":")) for name in train.ids(range(12))}
    assert kept | {(name, str(row)) for name, row in held_out} == {(k, str(row)) for k in "01" for row in range(8)}
    longest = [int(np.max([len(ids) for ids, _ in part.pair(i)])) for part in (train, val) for i in range(len(part))]
    assert data.splits.longest_sample == max(longest)


def test_pairs_of_one_prompt_are_all_trained_on_or_all_held_out(write_rows: Any) -> None:
    rows = [pair_of(answer, answer + 1, prompt) for prompt in range(1, 6) for answer in range(1, 4)]
    data = load(write_rows, rows, val_fraction=0.4)
    train, val = ([row // 3 for row in data.splits[name].rows.tolist()] for name in ("train", "val"))
    assert (len(train), len(val)) == (9, 6)
    assert not set(train) & set(val)
    with pytest.raises(RecipeError, match="val_fraction=0.4 of 1 different prompts of"):
        load(write_rows, rows[:3], val_fraction=0.4)


@pytest.mark.parametrize("name", ["bare texts", "one message each", "alpaca", "Axolotl", "ms-swift", "sharegpt"])
def test_questions_and_prompts_have_the_chosen_answer(name: str, write_rows: Any) -> None:
    row, tokenizer = SHAPES[name][0], make_tokenizer()
    source = Source(write_rows([row]), format="preference")
    (known,) = questions_of(Preparation(tokenizer), source)
    assert (known["expected"] or "").strip() == "cup"
    if name != "ms-swift":
        open_row = {key: value for key, value in row.items() if key not in ("chosen", "rejected")}
        (asked,) = questions_of(Preparation(tokenizer), replace(source, path=write_rows([open_row], "open.json")))
        assert (asked["prompt"], asked["expected"]) == (known["prompt"], None)
    data = load(write_rows, [row])
    if name != "bare texts":
        assert [one["expected"] for one in data.splits.prompts("train")] == ["cup"]


def test_the_order_depends_on_where_the_conversations_part() -> None:
    ids, lengths = np.arange(3, 15, dtype=np.int32), np.array([6, 6])
    parts = [collect(ids, ids, lengths, chosen=np.array(chosen)) for chosen in ([2, 3], [2, 3], [3, 2])]
    preparation = Preparation(make_tokenizer())
    one, same, other = (order_of_samples(join([part], []), preparation, Mixing()).saved() for part in parts)
    assert one == same
    assert one != other


# --- judged answers ----------------------------------------------------------------------------------


def judged(write_rows: Any, rows: list[dict[str, Any]], **options: Any) -> TextDataModule:
    data = TextDataModule(write_rows(rows), format="unpaired_preference", **options)
    data.load(make_tokenizer())
    return data


def answer_to(prompt: str, answer: str, is_good: bool) -> dict[str, Any]:
    return {"prompt": prompt, "completion": answer, "label": is_good}


def test_a_judged_answer_is_a_pair_that_lacks_the_other(write_rows: Any) -> None:
    rows = [answer_to("a", " cup", True), JUDGED["ms-swift"][0], answer_to("the", " lamp", False)]
    for _ in range(2):  # the second time from the cache
        data = judged(write_rows, rows)
        samples, end = data.splits["train"], "<|im_end|>"
        assert (len(samples), samples.kind, data.is_unpaired) == (3, "judged answer", True)
        assert (samples.judgments, samples.is_rejected.tolist()) == ("2 good, 1 bad", [0, 0, 1])
        assert texts(samples, 0) == [(f"a cup{end}", f" cup{end}"), ("", "")]
        assert [part for _, part in texts(samples, 1)] == [f"cup{end}", ""]
        assert texts(samples, 2) == [("", ""), (f"the lamp{end}", f" lamp{end}")]
        assert [len(samples.conversations(i)) for i in range(3)] == [1, 1, 1]
        assert samples.longest == int(samples.lengths.max())
    batch = pack_pairs([samples.pair(i) for i in range(3)], [0, 1, 2], [0, 0, 0])
    assert batch["segment_lengths"] == samples.lengths.tolist()
    assert sorted(set(batch["target_answers"].tolist())) == [0, 2, 5]
    pieces = split(batch, 2)
    assert [piece["pairs"].tolist() for piece in pieces] == [[0, 1], [2]]
    assert [sorted(set(piece["target_answers"].tolist())) for piece in pieces] == [[0, 2], [1]]
    assert sample_targets(batch) == samples.supervised.tolist()


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"q": "a", "said": " cup"}, {"prompt": "q", "completion": "said"}),
        ({"q": "a", "more": "the", "said": "cup"}, {"instruction": "q", "input": "more", "output": "said"}),
        ({"talk": [ASK, GOOD]}, {"messages": "talk"}),
        ({"talk": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "cup"}]}, {"conversations": "talk"}),
    ],
)
def test_columns_of_judged_answers_have_names_of_their_own(write_rows: Any, row: Any, columns: dict[str, str]) -> None:
    """Of prompt and answer as well as of the judgment."""
    ours = {name: row[theirs] for name, theirs in columns.items()}
    plain = judged(write_rows, [{**ours, "label": False}]).splits["train"]
    mapped = judged(write_rows, [{**row, "good": False}], columns={**columns, "label": "good"}).splits["train"]
    assert texts(mapped, 0) == texts(plain, 0)
    with pytest.raises(RecipeError, match="columns maps 'text', which is no column of the format unpaired_preference"):
        judged(write_rows, [{**row, "good": False}], columns={**columns, "label": "good", "text": "good"})


def test_prompts_with_answers_to_others(write_rows: Any) -> None:
    """Of the next row with another prompt, after the last one the first again."""
    said = [("a", " cup"), ("a", " lamp red"), ("the", " book"), ("the", " red"), ("a", " cup lamp red book")]
    whole = judged(write_rows, [answer_to(*one, n % 2 == 0) for n, one in enumerate(said)]).splits["train"]
    samples = whole.with_partners()
    tokenizer, end = make_tokenizer(), "<|im_end|>"
    found = [samples.mismatched(i) for i in range(5)]
    assert [tokenizer.decode(ids) for ids, _ in found] == [
        f"a book{end}",
        f"a book{end}",
        "the cup lamp red book" + end,
        "the cup lamp red book" + end,
        f"a book{end}",
    ]
    assert [tokenizer.decode(labels[labels >= 0]) for _, labels in found][2] == f" cup lamp red book{end}"
    assert samples.partners is not None
    assert samples.partners[:, 1].tolist() == [2, 2, 4, 4, 2]
    some = whole.take(np.array([0, 1, 2])).with_partners()  # the others are held out
    assert some.partners is not None
    assert some.partners[:, 1].tolist() == [2, 2, 0]
    one = judged(write_rows, [answer_to("a", f" {word}", True) for word in ("cup", "lamp")]).splits["train"]
    with pytest.raises(ValueError, match="all samples answer one prompt"):
        one.with_partners()


def test_the_longer_of_two_conversations_limits_a_prompt_with_another_answer(write_rows: Any) -> None:
    rows = [answer_to("a " * 20, " cup", True), answer_to("the", " lamp" * 15, False)]
    samples = judged(write_rows, rows).splits["train"].with_partners()
    assert len(samples.mismatched(0)[0]) == int(samples.lengths.max())
    pairs = load(write_rows, [pair_of(3, 5, prompt=2), pair_of(4, 1, prompt=7)]).splits["train"].with_partners()
    ids, labels = pairs.mismatched(0)
    (own, own_labels), (other, other_labels) = pairs.pair(0)[0], pairs.pair(1)[0]
    prompt = int(np.argmax(own_labels >= 0))
    assert ids[:prompt].tolist() == own[:prompt].tolist()
    assert labels[labels >= 0].tolist() == other_labels[other_labels >= 0].tolist()[: len(other) - prompt]


def test_answers_of_one_prompt_are_on_one_side(write_rows: Any) -> None:
    said = [(prompt, f" {word}") for prompt in ("a", "the", "red", "book") for word in ("cup", "lamp")]
    data = judged(write_rows, [answer_to(*one, True) for one in said], val_fraction=0.25)
    assert [len(data.splits[name]) for name in ("train", "val")] == [6, 2]
    groups = [set(data.splits[name].groups().tolist()) for name in ("train", "val")]
    assert groups[0].isdisjoint(groups[1])


def test_questions_of_judged_answers_expect_the_good_ones(write_rows: Any) -> None:
    rows = [
        answer_to("a", " cup", True),
        answer_to("the", " lamp", False),
        {"prompt": "red"},
        {"messages": [ASK]},
        {"instruction": "a", "kto_tag": True},
        {"messages": [ASK, GOOD]},
        JUDGED["ms-swift"][0],
    ]
    source = Source(write_rows(rows), format="unpaired_preference")
    questions = questions_of(Preparation(make_tokenizer()), source)
    assert [one["expected"] for one in questions] == [" cup", None, None, None, None, None, "cup"]


def test_exact_match_asks_for_good_answers_alone(write_rows: Any) -> None:
    rows = [{"messages": [turn("user", word), GOOD], "label": n != 1} for n, word in enumerate(("a", "the", "red"))]
    data = judged(write_rows, rows, val_path=write_rows(rows, "val.json"))
    data.load(make_tokenizer(), "validate")
    assert [one["question"] for one in data.splits.prompts("val")] == ["a", "red"]


def test_answers_that_are_all_judged_alike_are_named(write_rows: Any) -> None:
    alike = judged(write_rows, [answer_to(word, " cup", False) for word in ("a", "the")])
    assert "all 2 answers of the training data are judged alike (0 good, 2 bad)" in alike.splits.notes_on_judgments()[0]
    both = judged(write_rows, [answer_to(word, " cup", word == "a") for word in ("a", "the")])
    assert both.splits.notes_on_judgments() == []


def test_pairs_beside_judged_answers() -> None:
    sources = [Source("a.json", format="preference"), Source("b.json", format="unpaired_preference")]
    with pytest.raises(
        RecipeError, match=r"'a\.json' holds .*format: preference\), 'b\.json' is read as unpaired_pref"
    ):
        TextDataModule(sources=sources)
    assert TextDataModule("a.json", format="unpaired_preference", max_length=64, micro_batch_size=3).token_budget == 192
