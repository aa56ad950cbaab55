"""Training of the tokens that a recipe adds: their rows of the embeddings and, where it is not tied, of the head."""

import copy
from collections.abc import Sequence

from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.model.architecture import Architecture
from lit_ft.tuning.compatibility import check_situation


def with_added_rows(peft: PeftConfig, model: PreTrainedModel, ids: Sequence[int]) -> PeftConfig:
    """Config of a tuning method that also trains the embeddings of added tokens, and their rows in the head's weight.

    ``peft`` is not changed, and returned as it is where there are no ``ids``.

    Raises:
        RecipeError: the method cannot train them.
    """
    _check_tying(peft, model)
    if not ids:
        return peft
    config = copy.deepcopy(peft)
    options = peft.to_dict()
    is_tied = Architecture.of(model.config).is_tied
    sides = [_name_of(model, side) for side in _sides(model)[: 1 if is_tied else 2]]
    in_full = {name for name in options.get("modules_to_save") or [] if _is_side(model, name)}
    if in_full:
        if len(in_full) < len(_sides(model)) and not options.get("ensure_weight_tying"):
            raise RecipeError(
                f"model.peft: modules_to_save has {', '.join(in_full)} without the other side, so that added tokens "
                "would be read and never written, or the other way; take it out (their rows train without it)"
                + (", or set ensure_weight_tying" if is_tied else "")
            )
        return config
    check_situation(config, "added_tokens", "model.added_tokens")
    if config.peft_type.value == "LORA":
        given = config.trainable_token_indices or {}
        by_side = given if isinstance(given, dict) else {sides[0]: given}
        rows = {name: _union(by_side, name, ids) for name in sides}
        config.trainable_token_indices = rows[sides[0]] if len(sides) == 1 else rows
    else:
        config.token_indices = sorted({*config.token_indices, *ids})
        config.target_modules = config.target_modules or sides
    return config


def check_added_rows_train(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Refuse partial fine-tuning that leaves the random embeddings of added tokens untrained.

    Raises:
        RecipeError: embeddings or head are frozen.
    """
    for side in _sides(model):
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


def _is_side(model: PreTrainedModel, name: str) -> bool:
    sides = [_name_of(model, side) for side in _sides(model)]
    return any(side == name or side.endswith(f".{name}") for side in sides)


def _sides(model: PreTrainedModel) -> list[nn.Module]:
    """Modules with a row for each token: the embeddings, and the head unless the model scores texts."""
    sides = (model.get_input_embeddings(), model.get_output_embeddings())
    return [side for side in sides if side is not None]


def _name_of(model: PreTrainedModel, module: nn.Module) -> str:
    return next(name for name, part in model.named_modules() if part is module)
