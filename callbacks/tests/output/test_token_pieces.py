"""Texts of single tokens."""

from byte_tokenizer import CHAT, byte_tokenizer
from lit_callbacks.batch_tokens import SampleTokens
from lit_callbacks.output.token_pieces import show_sample, token_pieces
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def test_bytes_of_a_character_are_one_piece_and_special_tokens_are_told_apart() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(CHAT)["input_ids"]
    pieces = token_pieces(tokenizer, SampleTokens(ids, [False] * (len(ids) - 4) + [True] * 4))
    assert "".join(piece.text for piece in pieces) == CHAT
    assert len(ids) == len(pieces) + 2
    assert [tuple(piece) for piece in pieces[-3:]] == [
        ("\n", False, False),
        ("书", True, False),
        ("<|im_end|>", True, True),
    ]
    assert sum(piece.is_special for piece in pieces) == 4


def test_a_character_that_supervision_divides_is_shown_as_two() -> None:
    ids = byte_tokenizer()("书")["input_ids"]
    pieces = token_pieces(byte_tokenizer(), SampleTokens(ids, [False, True, True]))
    assert [piece.is_supervised for piece in pieces] == [False, True]
    assert pieces[0].text == "\ufffd"
    assert "".join(piece.text for piece in pieces).strip("\ufffd") == ""


def test_spaces_before_words_stay() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "s": 2}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    pieces = token_pieces(PreTrainedTokenizerFast(tokenizer_object=tokenizer), SampleTokens([0, 1, 2, 1], [True] * 4))
    assert [piece.text for piece in pieces] == ["one", " two", "s", " two"]


def test_the_middle_of_a_long_sample_is_counted() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("0123456789")["input_ids"]
    shown = show_sample(tokenizer, SampleTokens(ids, [False] * 6 + [True] * 4), 3)
    assert [piece.text for piece in (*shown["head"], *shown["tail"])] == list("012789")
    assert (shown["tokens"], shown["supervised"], shown["left_out"], shown["left_out_supervised"]) == (10, 4, 4, 1)
    whole = show_sample(tokenizer, SampleTokens(ids, [True] * 10), 5)
    assert (len(whole["head"]), whole["tail"], whole["left_out"]) == (10, [], 0)
