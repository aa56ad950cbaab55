"""Embeddings of tokens that a recipe adds: resizing, training of the new embeddings, and tied heads."""

import copy
from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.errors import RecipeError
from lit_ft.model.architecture import Architecture


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], special: bool) -> list[int]:
    """Add tokens to a tokenizer.

    Args:
        tokenizer: tokenizer, changed in place.
        tokens: texts that each become one token, wherever they occur.
        special: whether they are special tokens, which are left out when answers are decoded.

    Returns:
        Ids of the tokens.

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
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(tokens))
    return ids


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
    rows, wanted, is_skeleton = embeddings.num_embeddings, len(tokenizer), embeddings.weight.is_meta
    if wanted - added > rows:
        raise RecipeError(
            f"the tokenizer of {tokenizer.name_or_path!r} has {wanted - added} tokens, the model {rows} embeddings; "
            "set model.tokenizer to one that belongs to the model, and name new tokens in model.added_tokens"
        )
    if wanted > rows:
        model.resize_token_embeddings(wanted, mean_resizing=not is_skeleton)
    if added and not is_skeleton:
        how = f"the embeddings grow from {rows:,} to {wanted:,} rows" if wanted > rows else "in spare rows"
        rank_zero_info(f"{added} tokens are added: {how}")


def train_rows(peft: PeftConfig, model: PreTrainedModel, ids: Sequence[int]) -> PeftConfig:
    """Config of a tuning method that also trains the embeddings of added tokens, and their rows in the head's weight.

    Args:
        peft: config of the recipe, which is not changed.
        model: base model.
        ids: ids of the added tokens; without any, ``peft`` is returned.

    Raises:
        RecipeError: the method cannot train them.
    """
    _check_tying(peft, model)
    if not ids:
        return peft
    config = copy.deepcopy(peft)
    options = peft.to_dict()
    sides = [_name_of(model, model.get_input_embeddings())]
    if not _is_tied(model):
        sides.append(_name_of(model, model.get_output_embeddings()))
    whole = {name for name in options.get("modules_to_save") or [] if _is_side(model, name)}
    if whole:
        if len(whole) < 2 and not options.get("ensure_weight_tying"):
            raise RecipeError(
                f"model.peft: modules_to_save has {', '.join(whole)} without the other side, so that added tokens "
                "would be read and never written, or the other way; take it out (their rows train without it)"
                + (", or set ensure_weight_tying" if _is_tied(model) else "")
            )
    elif config.peft_type.value == "LORA":
        given = config.trainable_token_indices or {}
        by_side = given if isinstance(given, dict) else {sides[0]: given}
        rows = {name: _union(by_side, name, ids) for name in sides}
        config.trainable_token_indices = rows[sides[0]] if len(sides) == 1 else rows
    elif config.peft_type.value == "TRAINABLE_TOKENS":
        config.token_indices = sorted({*config.token_indices, *ids})
        config.target_modules = config.target_modules or sides
    else:
        raise RecipeError(
            f"model.added_tokens need rows of the embeddings that train, which {config.peft_type.value} does not have; "
            "take peft.LoraConfig, peft.TrainableTokensConfig, or peft: null"
        )
    return config


def check_rows_train(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Refuse partial fine-tuning that leaves the random embeddings of added tokens untrained.

    Raises:
        RecipeError: embeddings or head are frozen.
    """
    for side in (model.get_input_embeddings(), model.get_output_embeddings()):
        if ids and not side.weight.requires_grad:
            raise RecipeError(
                f"model.added_tokens need rows that train, and model.trainable freezes {_name_of(model, side)}; add "
                "its name to model.trainable"
            )


def _check_tying(peft: PeftConfig, model: PreTrainedModel) -> None:
    options = peft.to_dict()
    targets = options.get("target_modules")
    named = [name for name in targets if _is_side(model, name)] if isinstance(targets, (list, set, tuple)) else []
    if named and options.get("ensure_weight_tying") and not options.get("modules_to_save"):
        raise RecipeError(
            f"model.peft: ensure_weight_tying with {sorted(named)[0]} in target_modules shares LoRA's factors by "
            "views, which a copy of the model loses (peft 0.21); set modules_to_save: [embed_tokens] in their place, "
            "or trainable_token_indices"
        )


def _union(by_side: dict[str, list[int]], name: str, ids: Sequence[int]) -> list[int]:
    given = next((rows for key, rows in by_side.items() if name.endswith(key)), [])
    return sorted({*given, *ids})


def _is_tied(model: PreTrainedModel) -> bool:
    return Architecture.of(model.config).is_tied


def _is_side(model: PreTrainedModel, name: str) -> bool:
    sides = [_name_of(model, side) for side in (model.get_input_embeddings(), model.get_output_embeddings())]
    return any(side == name or side.endswith(f".{name}") for side in sides)


def _name_of(model: PreTrainedModel, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
