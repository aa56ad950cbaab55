"""Tokenizer of a GGUF file: vocabulary, merges, special tokens, end tokens and chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
from gguf import TokenType
from transformers import PreTrainedTokenizerBase

from lit_ft.errors import RecipeError
from lit_ft.gguf.pre_tokenizers import pre_tokenizer_of

_CONTROL = re.compile(r"<\|.*\|>|<｜.*｜>|<pad>|<mask>|<unused.*>")
"""Added tokens that llama.cpp's converter takes for control tokens, also where the tokenizer does not say so."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
MOST_ENDS = 3
"""llama.cpp has three names for tokens that end an answer: of a sequence, a turn and a message."""
_SPACE = "\u2581"
_PRE_TOKENIZERS = {"llama": "default", "gemma4": None}
_VISIBLE = frozenset(
    '<|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|>'.split()  # Gemma 4
)
"""Special tokens that llama.cpp's parser of answers reads: the text of an answer is without control tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and merges in the form of llama.cpp."""

    model: str
    """``gpt2`` for byte-level BPE, ``llama`` (by scores) or ``gemma4`` (by merges) for BPE with bytes as tokens."""
    pre_tokenizer: str | None
    tokens: list[str]
    types: list[TokenType]
    merges: list[str]
    scores: list[float]
    """With bytes as tokens: the order in which pairs of tokens are joined, as negative numbers."""
    adds_space: bool
    """With bytes as tokens: whether a text begins with a space."""

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Write the entries of the file."""
        writer.add_tokenizer_model(self.model)
        if self.pre_tokenizer is not None:
            writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.adds_space)
        if self.model != "llama":
            writer.add_token_merges(self.merges)


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, size: int, with_bytes: str) -> Vocabulary:
    """Vocabulary of a tokenizer.

    Args:
        tokenizer: tokenizer with its added tokens.
        size: rows of the model's embedding; those without a token get a name that no text has.
        with_bytes: name of llama.cpp's tokenizer for BPE that has bytes as tokens.

    Raises:
        RecipeError: llama.cpp cannot tokenize as this tokenizer does.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {}
    model = content.get("model", {})
    if model.get("type") != "BPE":
        kind = model.get("type") or type(tokenizer).__name__
        raise RecipeError(f"the tokenizer is {kind}, and only BPE tokenizers are written as GGUF; leave out --gguf")
    has_bytes = bool(model.get("byte_fallback"))
    pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    tokens, types = _tokens(tokenizer, model, size, has_bytes)
    return Vocabulary(
        model=with_bytes if has_bytes else "gpt2",
        pre_tokenizer=_PRE_TOKENIZERS[with_bytes] if has_bytes else pre_tokenizer_of(content),
        tokens=tokens,
        types=types,
        # A space within a merge is written as byte-level BPE writes it: spaces separate the two sides.
        merges=[" ".join(side.replace(" ", "Ġ") for side in pair) for pair in pairs],
        scores=_scores(tokens, pairs) if has_bytes else [],
        adds_space=_adds_space(content) if has_bytes else False,
    )


def _tokens(
    tokenizer: PreTrainedTokenizerBase, model: Mapping[str, Any], size: int, has_bytes: bool
) -> tuple[list[str], list[TokenType]]:
    tokens, types = [f"[PAD{number}]" for number in range(size)], [TokenType.UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number] = token
        types[number] = TokenType.BYTE if has_bytes and _BYTE.fullmatch(token) else TokenType.NORMAL
    if has_bytes and model.get("unk_token") in model["vocab"]:
        types[model["vocab"][model["unk_token"]]] = TokenType.UNKNOWN
    for number, added in tokenizer.added_tokens_decoder.items():
        if number >= size:
            raise RecipeError(f"the token {added.content!r} has the id {number}, and the model has {size} embeddings")
        if types[number] != TokenType.UNKNOWN:
            is_control = (added.special or _CONTROL.fullmatch(added.content)) and added.content not in _VISIBLE
            types[number] = TokenType.CONTROL if is_control else TokenType.USER_DEFINED
        tokens[number] = added.content
    return tokens, types


def _scores(tokens: Sequence[str], pairs: Sequence[Sequence[str]]) -> list[float]:
    """Scores of the tokens: minus the rank of the merge, as llama.cpp first joins the pair with the highest score."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(pairs))) for token in tokens]


def _adds_space(content: Mapping[str, Any]) -> bool:
    """Whether a SentencePiece tokenizer puts a space before a text.

    Raises:
        RecipeError: it changes texts in another way, which llama.cpp does not.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizer, pre = content.get("normalizer") or {}, content.get("pre_tokenizer")
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    if (pre is None or _splits_at(" ", pre)) and steps in (
        [{"type": "Prepend", "prepend": _SPACE}, replace],
        [replace],
    ):
        return len(steps) == 2
    if not steps and pre is not None and pre["type"] == "Metaspace" and not pre.get("split", True):
        return pre.get("prepend_scheme") in ("always", "first")
    kinds = [one["type"] for one in steps] + ([] if pre is None else [pre["type"]])
    raise RecipeError(f"the tokenizer's steps {', '.join(kinds)} are none that is known of llama.cpp; leave out --gguf")


def _splits_at(text: str, step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer splits at one text alone (Gemma's at spaces, which its normalizer has replaced)."""
    return step["type"] == "Split" and step["pattern"] == {"String": text}


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that llama.cpp treats apart."""

    ends: list[int]
    """Tokens that end an answer; the tokenizer's own first."""
    bos: int | None
    pad: int | None
    unknown: int | None
    adds_bos: bool
    """Whether a text begins with the BOS token."""

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Write the entries of the file."""
        names = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
        for end, add in zip(self.ends, names[: len(self.ends)], strict=True):
            add(end)
        for number, add in ((self.bos, writer.add_bos_token_id), (self.pad, writer.add_pad_token_id)):
            if number is not None:
                add(number)
        if self.unknown is not None:
            writer.add_unk_token_id(self.unknown)
        writer.add_add_bos_token(self.adds_bos)
        writer.add_add_eos_token(False)


def special_tokens_of(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> SpecialTokens:
    """Special tokens of a model.

    Args:
        tokenizer: its tokenizer.
        ends: tokens that end an answer, as in ``generation_config.json``.

    Raises:
        RecipeError: no token ends an answer, or more do than GGUF has room for, or the tokenizer adds tokens to a text
            that llama.cpp does not.
    """
    if not ends:
        raise RecipeError("the model has no token that ends an answer; set eos_token_id in its generation_config.json")
    if len(set(ends)) > MOST_ENDS:
        raise RecipeError(
            f"the model ends an answer at {len(set(ends))} tokens, and GGUF has room for {MOST_ENDS}; keep those that "
            "the chat template writes in eos_token_id of its generation_config.json"
        )
    bare, added = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    bos = tokenizer.bos_token_id
    if added not in (bare, [bos, *bare]):
        raise RecipeError(
            f"the tokenizer makes {added} of 'a', and llama.cpp adds at most a BOS token; leave out --gguf"
        )
    own = [tokenizer.eos_token_id] if tokenizer.eos_token_id in ends else []
    return SpecialTokens(
        ends=list(dict.fromkeys([*own, *ends])),
        bos=bos,
        pad=tokenizer.pad_token_id,
        unknown=tokenizer.unk_token_id,
        adds_bos=added != bare,
    )
