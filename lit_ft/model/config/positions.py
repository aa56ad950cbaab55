"""Number of positions that a model is made for, and what a recipe can do for longer samples."""

import math
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from lit_ft.errors import RecipeError

EXTENDING = ("yarn", "llama3", "longrope")
"""Kinds of rotary frequencies that extend ``original_max_position_embeddings``; ``max_position_embeddings`` is the
extended number in most configs. Linear and dynamic scaling multiply ``max_position_embeddings`` itself, as vLLM reads
them (``_get_and_verify_max_len``), but not where kinds of layers have their own: Gemma 3, which vLLM leaves out too."""


def positions_of(stated: int, rope: Mapping[str, object]) -> int:
    """Number of positions of a model.

    Args:
        stated: ``max_position_embeddings`` of its config.
        rope: ``rope_parameters`` of its config; without a ``rope_type`` nothing is scaled.
    """
    factor, original = rope.get("factor") or 1, rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float):
        return stated
    if rope.get("rope_type") in ("linear", "dynamic"):
        return int(stated * factor)
    if rope.get("rope_type") in EXTENDING and isinstance(original, int):
        return max(stated, int(original * factor))
    return stated


def positions_in(config: PretrainedConfig) -> int | None:
    """Number of positions of a model by its config; None where it has no such limit."""
    stated, rope = _stated(config)
    return positions_of(stated, rope) if isinstance(stated, int) else None


def has_rotary_positions(config: PretrainedConfig) -> bool:
    """Whether a model computes its positions, and so has some beyond those that it was trained for."""
    return bool(_stated(config)[1])


def _stated(config: PretrainedConfig) -> tuple[object, Mapping[str, object]]:
    """``max_position_embeddings``, under whatever name, and ``rope_parameters``."""
    text = config.get_text_config()
    values, name_there = text.to_dict(), text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    return values.get(name_there), values.get("rope_parameters") or {}


def check_positions(
    config: PretrainedConfig,
    length: int | None,
    what: str,
    name: str,
    otherwise: str | None = None,
    virtual_tokens: int = 0,
    is_fixed: bool = False,
) -> None:
    """Refuse samples that are longer than the model has positions.

    Args:
        config: config of the model.
        length: tokens of the longest sample; None if it is not known.
        what: where that length comes from, for the message.
        name: the model in the recipe, for the message.
        otherwise: what to do without more positions; None is ``data.max_length``.
        virtual_tokens: tokens of a tuning method that come before each sample, and take positions too.
        is_fixed: whether no option changes the config.

    Raises:
        RecipeError: there are too few positions; the message has the option that scales them filled in.
    """
    stated, rope = _stated(config)
    if length is None or not isinstance(stated, int):
        return
    needed, limit = length + virtual_tokens, positions_of(stated, rope)
    if needed <= limit:
        return
    fix = otherwise or f"set data.max_length={limit - virtual_tokens}"
    if not is_fixed and (option := _scaling(stated, rope, needed)):
        option = option if config.get_text_config() is config else f"{{text_config: {option}}}"
        fix = f"scale them with --model.config_overrides '{option}', or {fix}"
    size = f"{length:,} tokens" + (f" and {virtual_tokens} virtual tokens" if virtual_tokens else "")
    raise RecipeError(f"{what} of {size} is beyond the {limit:,} positions of {name}; {fix}")


def _scaling(stated: int, rope: Mapping[str, object], length: int) -> str:
    """Override of the config that extends rotary positions to ``length`` tokens; empty if there is no simple one."""
    kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    base = original if kind in EXTENDING and isinstance(original, int) else stated
    factor = math.ceil(100 * length / base) / 100
    if kind == "default":
        return f"{{rope_parameters: {{rope_type: yarn, factor: {factor:g}}}}}"
    if kind in ("yarn", "llama3", "linear", "dynamic"):
        return f"{{rope_parameters: {{factor: {factor:g}}}}}"
    if isinstance(full := rope.get("full_attention"), dict):  # by kind of layer; sliding windows need no extension
        return _scaling_by_kind(stated, full, length)
    return ""


def _scaling_by_kind(stated: int, full: Mapping[str, Any], length: int) -> str:
    """The same, where the layers of full attention have parameters ``full``, of a kind that stays."""
    kind = full.get("rope_type")
    if kind not in ("default", "linear", "proportional", "yarn", "llama3"):
        return ""
    factor = math.ceil(100 * (full.get("factor") or 1) * length / stated) / 100
    scaled = f"{'rope_type: linear, ' if kind == 'default' else ''}factor: {factor:g}"
    return f"{{max_position_embeddings: {length}, rope_parameters: {{full_attention: {{{scaled}}}}}}}"
