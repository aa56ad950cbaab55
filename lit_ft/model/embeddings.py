"""Tokens that a recipe adds: their ids in the tokenizer, and the resized embeddings of the model."""

from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.errors import RecipeError


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], special: bool) -> None:
    """Add tokens to a tokenizer.

    Args:
        tokenizer: tokenizer, changed in place.
        tokens: texts that each become one token, wherever they occur.
        special: whether they are special tokens, which are left out when answers are decoded.

    Raises:
        RecipeError: a token is empty, given twice, or already in the vocabulary.
    """
    option, vocabulary = "model.added_special_tokens" if special else "model.added_tokens", tokenizer.get_vocab()
    for token in tokens:
        if not token or list(tokens).count(token) > 1:
            raise RecipeError(f"{option}: {token!r} is {'given twice' if token else 'empty'}; take it out")
        if token in vocabulary:
            raise RecipeError(
                f"{option}: {token!r} is a token of {tokenizer.name_or_path!r} already (id {vocabulary[token]}); take "
                "it out"
            )
    tokenizer.add_tokens(list(tokens), special_tokens=special)


def resize_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, added: int) -> None:
    """Resize a model's embeddings to all tokens; transformers draws new ones around the mean of the others.

    Args:
        model: model, changed in place if it has too few embeddings; it may be on the meta device.
        tokenizer: tokenizer with the added tokens.
        added: number of tokens that the recipe added.

    Raises:
        RecipeError: the tokenizer had more tokens than the model before tokens were added.
    """
    embeddings = model.get_input_embeddings()
    rows, tokens, is_skeleton = embeddings.num_embeddings, len(tokenizer), embeddings.weight.is_meta
    if tokens - added > rows:
        raise RecipeError(
            f"the tokenizer of {tokenizer.name_or_path!r} has {tokens - added} tokens, the model {rows} embeddings; "
            "set model.tokenizer to one that belongs to the model, and name new tokens in model.added_tokens"
        )
    if tokens > rows:
        model.resize_token_embeddings(tokens, mean_resizing=not is_skeleton)
    if added and not is_skeleton:
        how = f"the embeddings grow from {rows:,} to {tokens:,} rows" if tokens > rows else "in spare rows"
        rank_zero_info(f"{added} tokens are added: {how}")
