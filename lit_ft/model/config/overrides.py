"""Values of a recipe in place of those in a model's config.json, for example another scaling of rotary positions."""

from collections.abc import Iterable, Mapping

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from lit_ft.errors import RecipeError, explained
from lit_ft.model.architecture import Architecture
from lit_ft.model.config.positions import EXTENDING, positions_of

Overrides = Mapping[str, object]
"""Values by their names in config.json; for parts of it (``text_config``, ``rope_parameters``) mappings again."""

_KEY = "model.config_overrides"


def with_overrides(config: PretrainedConfig, overrides: Overrides | None) -> PretrainedConfig:
    """Config with some values replaced; mappings are merged.

    Where YaRN or Llama 3's scaling extends the positions, ``max_position_embeddings`` becomes their new number, unless
    it is given: inference engines read it.

    Raises:
        RecipeError: a name is unknown, or the values do not fit together.
    """
    if not overrides:
        return config
    with explained(_KEY, "correct it", also=(StrictDataclassError,)):
        return type(config).from_dict(_merge(config, overrides, _KEY))


def _merge(config: PretrainedConfig, overrides: Overrides, key: str) -> dict[str, object]:
    values = config.to_dict()
    own = values.keys() - PretrainedConfig().to_dict().keys()  # what every config has is not the architecture's
    _check_names(overrides, own, key, f"the config of {config.model_type}")
    for name, value in overrides.items():
        part = vars(config).get(name)
        if isinstance(part, PretrainedConfig):
            values[name] = _merge(part, _mapping(value, f"{key}.{name}"), f"{key}.{name}")
        elif name == "rope_parameters":
            values[name] = _merge_rope(config, _mapping(value, f"{key}.{name}"), f"{key}.{name}")
        else:
            values[name] = value
    rope = values.get("rope_parameters")
    if "rope_parameters" in overrides and "max_position_embeddings" not in overrides and isinstance(rope, dict):
        parts = [rope[kind] for kind in config.nested_rope_parameter_keys(rope)] or [rope]
        extended = [positions_of(0, part) for part in parts if part.get("rope_type") in EXTENDING]
        if extended:
            values["max_position_embeddings"] = max(config.max_position_embeddings, *extended)
    return values


def _merge_rope(config: PretrainedConfig, overrides: Overrides, key: str) -> dict[str, object]:
    """Parameters of the rotary positions: one mapping, or one for each kind of layer (Gemma 3)."""
    present: dict[str, object] = config.rope_parameters or {}
    if kinds := config.nested_rope_parameter_keys(present):
        _check_names(overrides, kinds, key, f"the config of {config.model_type}, by kind of layer,")
        each = {kind: _mapping(value, f"{key}.{kind}") for kind, value in overrides.items()}
        return present | {
            kind: _scale(config, _mapping(present[kind] or {}, kind), value, f"{key}.{kind}")
            for kind, value in each.items()
        }
    return _scale(config, present, overrides, key)


def _scale(config: PretrainedConfig, present: Overrides, overrides: Overrides, key: str) -> dict[str, object]:
    _check_names(overrides, {*RopeParameters.__annotations__, *present}, key, "rope_parameters")
    kind, kinds = overrides.get("rope_type", present.get("rope_type")), ["default", *ROPE_INIT_FUNCTIONS]
    if kind not in kinds:
        raise RecipeError(f"{key}.rope_type={kind!r} is unknown; known are {', '.join(kinds)}")
    factor = overrides.get("factor", 1)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1:
        raise RecipeError(f"{key}.factor={factor!r} must be a number of 1 or more: how many times the positions grow")
    # Another kind has other parameters; these two describe the frequencies before any scaling.
    of_all_kinds = {name: present[name] for name in ("rope_theta", "partial_rotary_factor") if name in present}
    merged = {**(present if kind == present.get("rope_type") else of_all_kinds), **overrides}
    _check_lists(config, merged, overrides, key)
    if kind in EXTENDING:
        merged.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return merged


def _check_lists(config: PretrainedConfig, merged: Overrides, overrides: Overrides, key: str) -> None:
    part = merged.get("partial_rotary_factor") or 1
    assert isinstance(part, int | float)
    needed = int(Architecture.of(config).head_dim * part) // 2
    for name in {"short_factor", "long_factor"} & overrides.keys():
        value = overrides[name]
        if not isinstance(value, list) or len(value) != needed:
            given = f"of {len(value)}" if isinstance(value, list) else repr(value)
            raise RecipeError(
                f"{key}.{name} must be a list of {needed} numbers, one for each two rotated dimensions of a head, and "
                f"is {given}"
            )


def _check_names(overrides: Overrides, known: Iterable[str], key: str, where: str) -> None:
    known = sorted(known)
    if unknown := [name for name in overrides if name not in known]:
        renamed = "; rope_scaling is rope_parameters since transformers 5" if unknown[0] == "rope_scaling" else ""
        raise RecipeError(f"{key}: {where} has no {unknown[0]!r}{renamed}; it has {', '.join(known)}")


def _mapping(value: object, key: str) -> Overrides:
    if not isinstance(value, Mapping):
        raise RecipeError(f"{key}={value!r} must be a mapping, e.g. {{rope_type: yarn, factor: 4.0}}")
    return value
