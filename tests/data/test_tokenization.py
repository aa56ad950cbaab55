"""Text to ids on each kind of tokenizer, and what becomes of rows that are too long."""

import pickle
import random
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from shared_fixtures import WORDS, make_rows, make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lit_ft.data.text.rendering import Piece
from lit_ft.data.tokens.segment_encoder import TextEncoder
from lit_ft.data.tokens.tokenization import Tokenization, encode_batches
from lit_ft.data.tokens.truncation import Encoded, Overlong, fit_to_length
from lit_ft.errors import BadRow
from lit_ft.packed_batch import IGNORE_INDEX

SPACES = ("always", "first", "prepend")
"""Ways in which SentencePiece's tokenizers write a space before a text."""


def spaced_tokenizer(space: str, opens: bool = False) -> Any:
    """As Llama's first ones: spaces are ▁, and one stands before a text; ``opens`` adds <s> to raw text."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    end = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), *end])
    if space == "prepend":
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=space)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = list("▁abcdefghijklmnopqrstuvwxyz:")
    bpe.train_from_iterator(
        [" ".join(WORDS)] * 4,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=letters, show_progress=False),
    )
    if opens:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_tokens(["[INST]", "[/INST]"], special_tokens=True)
    return tokenizer


def byte_tokenizer(opens: bool = False) -> Any:
    tokenizer = make_tokenizer()
    if opens:
        tokenizer.add_tokens(["<s>"], special_tokens=True)
        tokenizer.bos_token = "<s>"
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    return tokenizer


def whole_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode(tokenizer: Any, *samples: list[Piece]) -> list[tuple[list[int], list[int]]]:
    ids, labels, lengths = TextEncoder(tokenizer).encode(samples)
    assert ids.dtype == labels.dtype == np.int32
    assert len(ids) == len(labels) == sum(lengths)
    return [(ids[a:b].tolist(), labels[a:b].tolist()) for a, b in pairwise([0, *accumulate(lengths)])]


def supervised(tokenizer: Any, labels: list[int]) -> list[str]:
    return tokenizer.convert_ids_to_tokens([label for label in labels if label != IGNORE_INDEX])


# --- text to ids -----------------------------------------------------------------------------------

PARTS = [
    *WORDS,
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "😀",
    "👩‍👩‍👧",
    "é",
    "e\u0301",
    "ß",
    "</s>",
    "<|im_end|>",
    "<|im_",
    "|>",
    "[INST]",
    "12",
    ".",
    "'s",
]


def random_samples(count: int, seed: int = 0) -> list[list[Piece]]:
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choice(PARTS) for _ in range(rng.randint(0, 12)))

    return [[(text(), rng.random() < 0.5) for _ in range(rng.randint(1, 5))] for _ in range(count)]


def test_which_tokenizers_encode_by_piece() -> None:
    assert TextEncoder(make_tokenizer()).is_piecewise
    assert TextEncoder(byte_tokenizer(opens=True)).is_piecewise
    assert [TextEncoder(spaced_tokenizer(space)).is_piecewise for space in SPACES] == [False] * 3
    assert TextEncoder(spaced_tokenizer("never")).is_piecewise
    with_space = make_tokenizer()
    with_space.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not TextEncoder(with_space).is_piecewise


@pytest.mark.parametrize("kind", ["bytes", "bytes, normalized", "never", "strips"])
def test_pieces_are_encoded_as_each_is_alone(kind: str) -> None:
    tokenizer = spaced_tokenizer("never") if kind == "never" else make_tokenizer()
    if kind == "bytes, normalized":
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    if kind == "strips":
        tokens = [
            AddedToken("[INST]", rstrip=True, special=True),
            AddedToken("<think>"),
            AddedToken("</s>", lstrip=True),
        ]
        tokenizer.add_tokens(tokens)
    samples = random_samples(400)
    for sample, (ids, labels) in zip(samples, encode(tokenizer, *samples), strict=True):
        pieces = [(whole_ids(tokenizer, text), flag) for text, flag in sample]
        assert ids == [id_ for piece, _ in pieces for id_ in piece]
        assert labels == [id_ if flag else IGNORE_INDEX for piece, flag in pieces for id_ in piece]


@pytest.mark.parametrize("space", SPACES)
def test_texts_of_spaced_tokenizers_are_encoded_whole(space: str) -> None:
    tokenizer, samples = spaced_tokenizer(space), random_samples(400)
    for sample, (ids, labels) in zip(samples, encode(tokenizer, *samples), strict=True):
        assert ids == whole_ids(tokenizer, "".join(text for text, _ in sample))
        assert all(label in (IGNORE_INDEX, id_) for id_, label in zip(ids, labels, strict=True))
        flags = {flag for text, flag in sample if text}
        if len(flags) < 2:
            assert labels == (ids if flags == {True} else [IGNORE_INDEX] * len(ids))


BORDERS: dict[str, tuple[list[Piece], list[str]]] = {
    "special tokens at both": (
        [("<s>[INST] the cup[/INST]", False), ("red</s>", True), ("[INST] a[/INST]", False), ("book</s>", True)],
        ["▁red", "</s>", "▁book", "</s>"],
    ),
    "space in the answer": ([("[INST] the cup:", False), (" red</s>", True)], ["▁red", "</s>"]),
    "space in the prompt": ([("the cup: ", False), ("red</s>", True), (" a", False)], ["▁red", "</s>"]),
    "bytes": ([("[INST]海[/INST]", False), ("山</s>", True)], ["▁", "<0xE5>", "<0xB1>", "<0xB1>", "</s>"]),
    "no space": ([("the cup:", False), ("red</s>", True)], ["re", "d", "</s>"]),
    "empty prompt": ([("", False), ("red</s>", True)], ["▁red", "</s>"]),
    "nothing at the end": ([("[INST]", False), ("red</s>", True), ("", False)], ["▁red", "</s>"]),
}


@pytest.mark.parametrize("name", BORDERS)
def test_masks_of_spaced_tokenizers_at_borders(name: str) -> None:
    tokenizer = spaced_tokenizer("always")
    sample, wanted = BORDERS[name]
    ((ids, labels),) = encode(tokenizer, sample)
    assert ids == whole_ids(tokenizer, "".join(text for text, _ in sample))
    assert supervised(tokenizer, labels) == wanted


@pytest.mark.parametrize("space", SPACES)
def test_marks_that_take_in_the_space_behind_them(space: str) -> None:
    """As Phi-3's: the one that ends an answer is learned, the one that opens it is not."""
    tokenizer = spaced_tokenizer(space)
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", rstrip=True, special=True) for name in ("user", "bot", "end")])
    question, between = "<|user|>\nthe cup<|end|>\n<|bot|>\n", "\n<|user|>\na<|end|>\n<|bot|>\n"
    sample = [(question, False), ("\nred<|end|>", True), (between, False), ("book<|end|>", True), ("\n", False)]
    ((ids, labels),) = encode(tokenizer, sample)
    assert ids == whole_ids(tokenizer, "".join(text for text, _ in sample))
    tokens = supervised(tokenizer, labels)
    assert "".join(tokens).replace("▁", "") == "red<|end|>book<|end|>"
    opening = tokenizer.convert_tokens_to_ids("<|bot|>")
    assert ids.count(opening) == 2
    assert opening not in labels


def test_nothing_to_encode() -> None:
    for tokenizer in (make_tokenizer(), spaced_tokenizer("first")):
        assert encode(tokenizer) == []
        assert encode(tokenizer, [("", False), ("", True)], []) == [([], []), ([], [])]


@pytest.mark.parametrize("make", [make_tokenizer, lambda: spaced_tokenizer("first")])
def test_truncation_and_padding_of_a_tokenizer_file_are_off(make: Any) -> None:
    tokenizer = make()
    wanted = encode(tokenizer, [("the cup ", False), ("red book </s>", True)], [("a", True)])
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=64, pad_id=0, pad_token="x")
    assert encode(tokenizer, [("the cup ", False), ("red book </s>", True)], [("a", True)]) == wanted
    assert len(wanted[0][0]) > 3
    assert len(wanted[1][0]) == 1


def test_special_tokens_within_text_are_noticed_whatever_they_strip() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("[A]", rstrip=True, special=True), AddedToken("[B]", lstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("<think>")])
    encoder = TextEncoder(tokenizer)
    texts = ["a <|im_end|>", "[A] b", "c[B]", "<think>", "<|im_", ""]
    assert [encoder.has_special(text) for text in texts] == [True, True, True, False, False, False]


# --- raw text --------------------------------------------------------------------------------------

TOKENIZERS = {
    "bytes": lambda opens: byte_tokenizer(opens),
    **{space: lambda opens, space=space: spaced_tokenizer(space, opens) for space in SPACES},
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("opens", [True, False])
def test_raw_text_is_as_the_tokenizer_has_it_and_is_closed(kind: str, opens: bool) -> None:
    tokenizer = TOKENIZERS[kind](opens)
    texts = ["the red book", " cup\n", "红 😀", "a <s> a</s> b"]
    encoded = Tokenization(tokenizer, "completion").encode([{"text": text} for text in texts])
    cuts = np.cumsum(encoded.lengths)[:-1]
    for text, ids, labels in zip(texts, np.split(encoded.ids, cuts), np.split(encoded.labels, cuts), strict=True):
        assert ids.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert ids[0] == tokenizer.bos_token_id or not opens
        assert labels.tolist() == ([IGNORE_INDEX, *ids[1:]] if opens else ids.tolist())


@pytest.mark.parametrize("opens", [True, False])
def test_a_prompt_and_a_completion_open_once(opens: bool) -> None:
    tokenizer = byte_tokenizer(opens)
    chat = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    rows = [{"prompt": "the ", "completion": "cup"}, {"prompt": chat[0], "completion": chat[1]}]
    encoded = Tokenization(tokenizer, "prompt_completion").encode(rows)
    texts = [tokenizer.decode(ids) for ids in np.split(encoded.ids, [encoded.lengths[0]])]
    assert texts == [
        f"{'<s>' * opens}the cup<|im_end|>",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>",
    ]
    spelled = tokenizer.decode([label for label in encoded.labels if label != IGNORE_INDEX])
    assert spelled == "cup<|im_end|>b<|im_end|>"


# --- length ----------------------------------------------------------------------------------------


def fit(
    *masks: str,
    max_length: int | None,
    overlong: Overlong,
    whole: Iterable[int] = (),
    bos: int | None = None,
) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Fit samples whose ids count up from 0; returns each as (row, e.g. ``"0 1 2x"``: 2 is a target), and notes."""
    lengths = np.array([len(mask) for mask in masks], dtype=np.int64)
    ids = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    labels = np.where(np.array(list("".join(masks))) == "x", ids, np.int32(IGNORE_INDEX))
    encoded = Encoded(ids, labels, lengths, np.arange(len(masks)), len(masks))
    fitted = fit_to_length(encoded, max_length, overlong, set(whole), bos)
    assert fitted is encoded
    assert not fitted.too_long or overlong == "error"
    found, start = [], 0
    for row, length in zip(fitted.rows.tolist(), fitted.lengths.tolist(), strict=True):
        span = slice(start, start + length)
        pairs = zip(fitted.ids[span], fitted.labels[span], strict=True)
        found.append((row, " ".join(f"{id_}{'x' if label == id_ else ''}" for id_, label in pairs)))
        start += length
    assert start == len(fitted.ids) == len(fitted.labels)
    return found, dict(+fitted.notes)


LONG = ".....xxx"
SHORT = "..xx"
FITTED: dict[str, tuple[dict[str, Any], list[tuple[int, str]], dict[str, int]]] = {
    "no limit": (
        {"max_length": None, "overlong": "drop"},
        [(0, "0 1 2x 3x"), (1, "0 1 2 3 4 5x 6x 7x"), (2, "0 1 2x 3x")],
        {},
    ),
    "as long as may be": (
        {"max_length": 8, "overlong": "drop"},
        [(0, "0 1 2x 3x"), (1, "0 1 2 3 4 5x 6x 7x"), (2, "0 1 2x 3x")],
        {},
    ),
    "truncate": (
        {"max_length": 7, "overlong": "truncate"},
        [(0, "0 1 2x 3x"), (1, "0 1 2 3 4 5x 6x"), (2, "0 1 2x 3x")],
        {"truncated": 1},
    ),
    "truncate, answer gone": (
        {"max_length": 5, "overlong": "truncate"},
        [(0, "0 1 2x 3x"), (2, "0 1 2x 3x")],
        {"truncated": 1, "nothing supervised": 1},
    ),
    "drop": ({"max_length": 7, "overlong": "drop"}, [(0, "0 1 2x 3x"), (2, "0 1 2x 3x")], {"dropped": 1}),
    "left": (
        {"max_length": 5, "overlong": "truncate_left_prompt"},
        [(0, "0 1 2x 3x"), (1, "3 4 5x 6x 7x"), (2, "0 1 2x 3x")],
        {"prompt truncated": 1},
    ),
    "left, with bos": (
        {"max_length": 5, "overlong": "truncate_left_prompt", "bos": 0},
        [(0, "0 1 2x 3x"), (1, "0 4 5x 6x 7x"), (2, "0 1 2x 3x")],
        {"prompt truncated": 1},
    ),
    "left, other bos": (
        {"max_length": 5, "overlong": "truncate_left_prompt", "bos": 9},
        [(0, "0 1 2x 3x"), (1, "3 4 5x 6x 7x"), (2, "0 1 2x 3x")],
        {"prompt truncated": 1},
    ),
}


@pytest.mark.parametrize("name", FITTED)
def test_each_choice_for_long_rows(name: str) -> None:
    options, rows, notes = FITTED[name]
    assert fit(SHORT, LONG, SHORT, **options) == (rows, notes)


TOO_LONG_ANSWERS = {
    ("..xxxxxx", 4, None): "1 2x 3x 4x",
    ("..xxxxxx", 4, 0): "0 1 2x 3x",
    ("..xxxxxx", 6, None): "1 2x 3x 4x 5x 6x",  # the answer would fit, with nothing to predict its first token from
    ("xxxxxx", 4, None): "0x 1x 2x 3x",
    (".xxxxxx", 4, 0): "0 1x 2x 3x",
}


@pytest.mark.parametrize(("mask", "max_length", "bos"), TOO_LONG_ANSWERS)
def test_an_answer_that_alone_is_too_long_loses_its_end(mask: str, max_length: int, bos: int | None) -> None:
    wanted = [(0, TOO_LONG_ANSWERS[mask, max_length, bos])]
    found = fit(mask, max_length=max_length, overlong="truncate_left_prompt", bos=bos)
    assert found == (wanted, {"truncated": 1})


@pytest.mark.parametrize(
    ("max_length", "text"),
    [
        (9, "1 2x 3x 4 5 6 7x 8x 9x"),
        (8, "2x 3x 4 5 6 7x 8x 9x"),
        (5, "5 6 7x 8x 9x"),
        (4, "6 7x 8x 9x"),
        (3, "6 7x 8x"),
    ],
)
def test_conversations_keep_their_last_turns(max_length: int, text: str) -> None:
    """The first token of a sample is no target, so an earlier answer may begin there."""
    note = "prompt truncated" if max_length > 3 else "truncated"
    found = fit("..xx...xxx", max_length=max_length, overlong="truncate_left_prompt")
    assert found == ([(0, text)], {note: 1})


def test_what_comes_after_the_last_answer_goes_first() -> None:
    found, _ = fit("..xx....", max_length=4, overlong="truncate_left_prompt")
    assert found == [(0, "0 1 2x 3x")]


def test_long_rows_that_are_an_error_are_named_with_their_tokens() -> None:
    ids = np.arange(12, dtype=np.int32)
    encoded = Encoded(ids, ids, np.array([3, 5, 4]), np.array([0, 2, 5]), 6)
    assert fit_to_length(encoded, 3, "error", {0, 2, 5}, None).too_long == [(2, 5), (5, 4)]


@pytest.mark.parametrize("overlong", ["truncate", "truncate_left_prompt"])
@pytest.mark.parametrize("max_length", [2, 3, 5, 7, 8, 9, 15, 16])
@pytest.mark.parametrize("length", [8, 9, 15, 16, 17])
def test_raw_text_goes_on_in_further_samples(length: int, max_length: int, overlong: Overlong) -> None:
    """Every token but the first is a target exactly once, as ``pack_samples`` has it."""
    found, notes = fit(
        SHORT, "x" * length, "." + "x" * (length - 1), max_length=max(max_length, 4), overlong=overlong, whole={1, 2}
    )
    assert found[0] == (0, "0 1 2x 3x")
    for row in (1, 2):
        samples = [text.split() for owner, text in found if owner == row]
        targets = [token for tokens in samples for token in tokens[1:]]
        assert targets == [f"{token}x" for token in range(1, length)]
        assert all(len(tokens) <= max(max_length, 4) for tokens in samples)
    assert notes == ({"continued": 2} if length > max(max_length, 4) else {})
    assert [row for row, _ in found] == sorted(row for row, _ in found)


@pytest.mark.parametrize("overlong", ["drop", "error"])
def test_raw_text_is_dropped_or_refused_where_that_is_asked_for(overlong: Overlong) -> None:
    ids = np.arange(9, dtype=np.int32)
    encoded = fit_to_length(Encoded(ids, ids, np.array([9]), np.array([0]), 1), 4, overlong, {0}, None)
    assert encoded.rows.tolist() == []
    assert (encoded.too_long, dict(encoded.notes)) == (([(0, 9)], {}) if overlong == "error" else ([], {"dropped": 1}))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_long_raw_text_with_an_opening_token(kind: str) -> None:
    tokenizer, text = TOKENIZERS[kind](True), "the red cup is under a blue lamp " * 5
    encoded = Tokenization(tokenizer, "completion", max_length=16).encode([{"text": text}])
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    cuts = np.cumsum(encoded.lengths)[:-1]
    targets = [label for labels in np.split(encoded.labels, cuts) for label in labels[1:].tolist()]
    assert targets == ids[1:]
    assert encoded.lengths.max() == 16
    assert encoded.notes["continued"] == 1


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_at_the_ends_of_raw_text_are_not_doubled(kind: str) -> None:
    """As of rows that ``apply_chat_template`` has written, or to which a script adds the end."""
    tokenizer, text = TOKENIZERS[kind](True), "the red cup"
    wanted = Tokenization(tokenizer, "completion").encode([{"text": text}])
    text = f"{tokenizer.bos_token}{text}{tokenizer.eos_token}"
    both = Tokenization(tokenizer, "completion").encode([{"text": text}, {"text": text + "\n"}])
    assert both.ids[: both.lengths[0]].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    for special in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        assert (both.ids == special).sum() == 2 * (wanted.ids == special).sum() == 2


def test_samples_that_teach_nothing_are_left_out_and_counted() -> None:
    found = fit("....", "x...", "", ".x", "x", "", max_length=None, overlong="truncate")
    assert found == ([(3, "0 1x")], {"nothing supervised": 5})
    assert fit("....", max_length=4, overlong="truncate") == ([], {"nothing supervised": 1})


@pytest.mark.slow
@pytest.mark.parametrize("overlong", ["truncate", "truncate_left_prompt", "drop", "error"])
@pytest.mark.parametrize("make", [make_tokenizer, lambda: chat_tokenizer("first")])
def test_every_sample_has_a_target_and_every_row_an_account(make: Any, overlong: Overlong) -> None:
    tokenizer, rows = make(), make_rows(120, seed=5)
    for max_length in (8, 14, 20, 40):
        encoded = Tokenization(tokenizer, "alpaca", max_length=max_length, overlong=overlong).encode(rows)
        for labels in np.split(encoded.labels, np.cumsum(encoded.lengths)[:-1]):
            assert (labels[1:] != IGNORE_INDEX).any() or not len(encoded.lengths)
        lost = encoded.notes["dropped"] + encoded.notes["nothing supervised"] + len(encoded.too_long)
        assert len(encoded.lengths) + lost == len(rows)
        assert encoded.lengths.max(initial=0) <= max_length


def chat_tokenizer(space: str) -> Any:
    tokenizer = spaced_tokenizer(space, opens=True)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    return tokenizer


@pytest.mark.parametrize("space", SPACES)
def test_conversations_of_spaced_tokenizers_are_as_at_inference(space: str) -> None:
    tokenizer = chat_tokenizer(space)
    chat = [{"role": role, "content": text} for role, text in (("user", "the cup"), ("assistant", "红 lamp")) * 2]
    encoded = Tokenization(tokenizer, "messages").encode([{"messages": chat}])
    assert encoded.ids.tolist() == tokenizer.apply_chat_template(chat)["input_ids"]
    prompt = tokenizer.apply_chat_template(chat[:3], add_generation_prompt=True)["input_ids"]
    answer = [IGNORE_INDEX] * len(prompt) + encoded.ids[len(prompt) :].tolist()
    assert encoded.ids[: len(prompt)].tolist() == prompt
    assert encoded.labels[len(prompt) :].tolist() == answer[len(prompt) :]
    assert encoded.notes == Counter()
    kept = [label for label in encoded.labels.tolist() if label != IGNORE_INDEX]
    assert tokenizer.decode(kept).replace("  ", " ").lstrip() == "红 lamp</s> 红 lamp</s>"


def test_bos_stays_before_a_prompt_that_loses_its_beginning() -> None:
    tokenizer = chat_tokenizer("first")
    row = {"instruction": "the red book is under a cup", "output": "a lamp"}
    options: dict[str, Any] = {"max_length": 8, "overlong": "truncate_left_prompt"}
    whole = Tokenization(tokenizer, "alpaca").encode([row]).ids.tolist()
    cut = Tokenization(tokenizer, "alpaca", **options).encode([row])
    assert cut.ids.tolist() == [tokenizer.bos_token_id, *whole[-7:]]
    assert dict(+cut.notes) == {"prompt truncated": 1}


# --- many rows -------------------------------------------------------------------------------------


def batches_of(rows: list[Any]) -> list[tuple[int, list[Any]]]:
    placed = [(i % 2, f"row {i}", row) for i, row in enumerate(rows)]
    return [(start, placed[start : start + 7]) for start in range(0, len(placed), 7)]


def flatten(results: Any) -> list[Any]:
    return [
        (tag, places, [(source, mine.tolist(), *fields_of(encoded)) for source, mine, encoded in parts])
        for tag, places, parts in results
    ]


def fields_of(encoded: Encoded) -> list[Any]:
    arrays = [getattr(encoded, name).tolist() for name in ("ids", "labels", "lengths", "rows")]
    return [*arrays, encoded.count, encoded.bad, encoded.too_long, encoded.notes]


@pytest.mark.slow
@pytest.mark.parametrize("used", [False, True])
def test_the_result_does_not_depend_on_the_workers(used: bool) -> None:
    rows: list[Any] = make_rows(60)
    rows[5], rows[20], rows[33] = BadRow("is not JSON"), {"instruction": "a"}, {"instruction": "\ud83d", "output": "b"}
    tokenizations = [
        Tokenization(make_tokenizer(), "alpaca", max_length=24),
        Tokenization(chat_tokenizer("always"), "alpaca", max_length=30, overlong="error"),
    ]
    wanted = flatten(encode_batches(batches_of(rows), tokenizations, 0))
    if not used:
        tokenizations = [
            Tokenization(t.tokenizer, t.format, max_length=t.max_length, overlong=t.overlong) for t in tokenizations
        ]
    assert [tag for tag, _, _ in wanted] == list(range(0, 60, 7))
    assert [place for _, places, _ in wanted for place in places] == [f"row {i}" for i in range(60)]
    bad = [
        (places[mine[i]], text.split(";")[0])
        for _, places, parts in wanted
        for _, mine, *_, bad, _, _ in parts
        for i, text in bad
    ]
    assert sorted(bad) == [
        ("row 20", "has no 'output'"),
        ("row 33", "its text holds half of a surrogate pair (\\ud83d)"),
        ("row 5", "is not JSON"),
    ]
    for workers, ahead in ((1, 0), (2, 0), (2, 50)):
        assert flatten(encode_batches(batches_of(rows), tokenizations, workers, ahead)) == wanted


def test_a_tokenization_that_was_used_can_go_to_another_process() -> None:
    used = Tokenization(make_tokenizer(), "alpaca", system="s", max_length=24)
    rows = make_rows(9)
    wanted = fields_of(used.encode(rows))
    assert fields_of(pickle.loads(pickle.dumps(used)).encode(rows)) == wanted
