"""Streamed answers: the same text as in one piece, stopped where they should be, decoded as asked."""

import logging

import pytest

from lit_ft.errors import RecipeError
from lit_ft.inference.opening import OpenedModel, open_model
from lit_ft.inference.text_stream import Decoding, TextPieces, stream_answer
from lit_ft.model.generation import generate_answers, stop_ids

pytestmark = pytest.mark.slow
PROMPT = "<|im_start|>user\nthe green lamp<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def opened(model_folder: str) -> OpenedModel:
    return open_model(model_folder)


def test_pieces_together_are_the_answer(opened: OpenedModel) -> None:
    pieces: list[str] = []
    answer = stream_answer(opened, PROMPT, Decoding(max_new_tokens=20, temperature=0), pieces.append)
    ids = opened.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
    shown = opened.tokenizer.decode(ids, skip_special_tokens=True)
    assert len(pieces) > 1
    assert "".join(pieces) == answer.text
    (generated,) = generate_answers(opened.model, opened.base, opened.tokenizer, [PROMPT], 20)
    assert generated[:2] == (shown, "length")
    assert (answer.tokens, answer.ended) == (20, "length")


def test_a_token_s_text_is_there_at_once_and_a_part_of_a_character_never(opened: OpenedModel) -> None:
    text, tokenizer = 'say: "red",绿😀!😀.', opened.tokenizer
    ids, pieces = tokenizer(text, add_special_tokens=False)["input_ids"], TextPieces(tokenizer)
    shown = [pieces.add(token) for token in ids]
    assert "".join(shown) == text
    assert pieces.rest() == ""
    alone = [tokenizer.decode([token]) for token in ids]
    assert any("\ufffd" in one for one in alone)
    assert all(one == piece for one, piece in zip(alone, shown, strict=True) if "\ufffd" not in one)
    assert pieces.add(ids[alone.index("\ufffd")]) == ""
    assert pieces.rest() == "\ufffd"


def test_an_answer_ends_at_the_end_of_the_turn_and_does_not_show_it(opened: OpenedModel) -> None:
    full = stream_answer(opened, PROMPT, Decoding(max_new_tokens=20, temperature=0), lambda _: None)
    sixth = full.ids[5]
    given = opened.base.generation_config.eos_token_id
    opened.base.generation_config.eos_token_id = [sixth]
    try:
        assert sixth in stop_ids(opened.base, opened.tokenizer)
        short = stream_answer(opened, PROMPT, Decoding(max_new_tokens=20, temperature=0), lambda _: None)
    finally:
        opened.base.generation_config.eos_token_id = given
    assert short.ended == "stop"
    assert short.tokens <= 6
    assert full.text.startswith(short.text)
    assert opened.tokenizer.decode([sixth]) not in short.text


def test_the_caller_stops_an_answer(opened: OpenedModel) -> None:
    pieces: list[str] = []
    answer = stream_answer(opened, PROMPT, Decoding(max_new_tokens=50), pieces.append, lambda: len(pieces) >= 2)
    assert answer.ended == "cancelled"
    assert 2 <= answer.tokens < 50


def test_values_of_the_model_hold_until_the_user_gives_others(opened: OpenedModel) -> None:
    config = opened.base.generation_config
    config.do_sample, config.temperature, config.top_k, config.repetition_penalty = True, 0.6, 20, 1.1
    try:
        assert Decoding().describe(opened) == (
            "sampled, temperature 0.6, top_k 20, repetition_penalty 1.1, up to 1,024 tokens"
        )
        assert Decoding(temperature=0.0).describe(opened) == "greedy, repetition_penalty 1.1, up to 1,024 tokens"
        drawn = [stream_answer(opened, PROMPT, Decoding(12, seed=seed), lambda _: None).text for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
    finally:
        config.do_sample, config.temperature, config.top_k, config.repetition_penalty = False, None, None, None


def test_an_answer_stays_within_the_model_s_positions(
    opened: OpenedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(opened.tokenizer, "model_max_length", 512)
    long = PROMPT + "lamp " * 1000
    with pytest.raises(RecipeError, match="512 positions; ask less, or in a terminal take back"):
        stream_answer(opened, long, Decoding(), lambda _: None)
    assert not caplog.records  # transformers has nothing to add
    ids = opened.tokenizer(long, add_special_tokens=False)["input_ids"][:509]
    answer = stream_answer(opened, opened.tokenizer.decode(ids), Decoding(temperature=0), lambda _: None)
    assert answer.tokens <= 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "-1", "must be 0 .greedy. or above$"),
        ("temperature", "nan", "must be 0 .greedy. or a finite number above"),
        ("temperature", "1e-300", "must be 0 .greedy. or at least 1e-15"),
        ("repetition_penalty", "1e-300", "must be from 1e-15 to 1e15; 1 is none"),
        ("top_p", "0", "over 0 and at most 1"),
        ("min_p", "1.5", "from 0 .all tokens. to 1"),
        ("max_new_tokens", "0", "1 token or more"),
        ("max_new_tokens", "many", "is no whole number"),
        ("seed", "-1", "must be 0 or more"),
        ("beams", "2", "is no setting"),
    ],
)
def test_settings_that_make_no_sense(name: str, value: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Decoding().changed(name, value)


def test_a_changed_setting_goes_back_to_the_model_s_own() -> None:
    changed = Decoding().changed("top_k", "5").changed("temperature", "0.5")
    assert changed == Decoding(top_k=5, temperature=0.5)
    assert changed.changed("top_k", "default").changed("temperature", "default") == Decoding()
