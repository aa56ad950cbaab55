"""Layers that ``target_modules: all-linear`` selects, and layers that an adapter does not fit."""

import re
from collections.abc import Mapping

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from peft import AdaLoraConfig, LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key
from torch import nn
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals.peft import all_linear_layers, names_read_otherwise, refuses_target
from lit_ft.model.architecture import is_norm_read_from_outside, linear_routers, read_from_outside
from lit_ft.model.quantization import LinearLayer, linear_modules
from lit_ft.tuning.targets import unreached

_GROUPED = frozenset({"DeepseekV4GroupedLinear"})
"""Classes derived from ``nn.Linear`` that multiply each group of their inputs by a part of their weight, whose outputs
PEFT would add to those of the whole weight (transformers 5.24)."""


def grouped_layers(model: PreTrainedModel) -> list[str]:
    """Names of layers that multiply groups of their inputs, which LoRA changes as parameters."""
    return [name for name, module in linear_modules(model).items() if type(module).__name__ in _GROUPED]


def leave_out(model: PreTrainedModel, peft: PeftConfig, shared: Mapping[str, str]) -> None:
    """Let ``target_modules: all-linear`` leave out layers that an adapter would not train, or not exactly, or fill.

    A config without ``exclude_modules`` (VeRA's, say) gets the names of all other linear layers instead. ``peft`` is
    changed in place; ``shared`` is the result of ``shared_layers``.
    """
    options = peft.to_dict()
    if options.get("target_modules") != "all-linear":
        return
    names: list[str] = []
    reasons = _unread(model, peft), _routers(model, peft), _unreached(model), _sharing(shared), _lost(model, peft)
    for left_out, what in reasons:
        if left_out:
            rank_zero_info(f"model.peft: all-linear leaves out {what}")
            names += left_out
    if narrow := _narrow(model, peft, names):
        rank_zero_info(f"model.peft: all-linear leaves out {_smaller_than_rank(narrow)}")
        names += narrow
    if not names:
        return
    pattern = rf"(.*\.)?({'|'.join(map(re.escape, names))})"
    if "exclude_modules" not in options:
        peft.target_modules = {n for n in all_linear_layers(peft, model) if not re.fullmatch(pattern, n)}
    elif isinstance(given := options["exclude_modules"], str):
        peft.exclude_modules = f"{given}|{pattern}"
    else:
        peft.exclude_modules = [*(given or ()), *names]


def _unread(model: PreTrainedModel, peft: PeftConfig) -> tuple[list[str], str]:
    """Last names of layers whose weights are read without an adapter, and what they are.

    PEFT refuses some of Mamba's, and would adapt the others to no effect. Layers of groups are among them, unless the
    method is LoRA.
    """
    from_outside = read_from_outside(model.config)
    of_groups = set() if isinstance(peft, LoraConfig) else {name.rsplit(".", 1)[-1] for name in grouped_layers(model)}
    unread = sorted(
        name
        for name in {name.rsplit(".", 1)[-1] for name in linear_modules(model)}
        if name in of_groups or refuses_target(peft, model, name) or name in from_outside
    )
    return unread, f"{', '.join(unread)}, whose weights {type(model).__name__} reads without an adapter"


def _routers(model: PreTrainedModel, peft: PeftConfig) -> tuple[list[str], str]:
    """Last names of linear layers that return more than a product, and what they are; LoRA leaves out all routers."""
    names = set() if isinstance(peft, LoraConfig) else linear_routers(model.config)
    return sorted(names), f"{', '.join(sorted(names))}, which returns more than a product"


def _unreached(model: PreTrainedModel) -> tuple[list[str], str]:
    """Names of layers that get no gradient from text, and what they are."""
    names = unreached.names_within(linear_modules(model))
    last = sorted({name.rsplit(".", 1)[-1] for name in names})
    return list(names), f"{', '.join(last)} of {unreached.describe(names.values())}"


def _sharing(shared: Mapping[str, str]) -> tuple[list[str], str]:
    """Names of layers that share their weight with another layer, and what they are."""
    example = _example(shared) if shared else ""
    return list(shared), f"{len(shared)} layers ({example}), which could not be merged: {_WHY}"


def _narrow(model: PreTrainedModel, peft: PeftConfig, left_out: list[str]) -> dict[str, tuple[int, int, int]]:
    """Layers that are smaller than the rank of LoRA, as gates with one output are: names, outputs, inputs and rank.

    Empty if all layers are, which ``check_ranks`` refuses.
    """
    if not isinstance(peft, LoraConfig):
        return {}
    # AdaLoRA's rank_pattern is what it finds.
    rank, ranks = (peft.init_r, {}) if isinstance(peft, AdaLoraConfig) else (peft.r, peft.rank_pattern or {})
    layers = {
        name: (layer.out_features, layer.in_features, ranks.get(get_pattern_key(list(ranks), name), rank))
        for name in sorted(all_linear_layers(peft, model))
        if {name, name.rsplit(".", 1)[-1]}.isdisjoint(left_out)
        and isinstance(layer := model.get_submodule(name), LinearLayer)
    }
    narrow = {name: shape for name, shape in layers.items() if min(shape) < shape[-1]}
    return narrow if len(narrow) < len(layers) else {}


def _smaller_than_rank(narrow: Mapping[str, tuple[int, int, int]]) -> str:
    kinds = {(name.rsplit(".", 1)[-1], *shape) for name, shape in narrow.items()}
    layers = ", ".join(f"{name} ({outputs} x {inputs})" for name, outputs, inputs, _ in sorted(kinds))
    ranks = " and ".join(map(str, sorted({rank for *_, rank in kinds})))
    return f"{layers}, whose smaller dimension is below rank {ranks} (LoRA's rank_pattern gives layers their own)"


def _lost(model: PreTrainedModel, peft: PeftConfig) -> tuple[list[str], str]:
    """Names of layers whose adapters PEFT would not load, and what they are."""
    names = names_read_otherwise(peft, model, linear_modules(model))
    last = sorted({name.rsplit(".", 1)[-1] for name in names})
    return names, f"{len(names)} layers ({', '.join(last)}), {_LOST}"


_LOST = "whose LoRA weights PEFT renames when it reads an adapter, and would not load (peft 0.21)"
_WHY = "each would get an adapter of its own, and their one weight can take one change only"


def shared_layers(model: PreTrainedModel) -> dict[str, str]:
    """Names of linear layers whose weight is that of another layer too, and one of these; without the head."""
    named: dict[int, list[str]] = {}
    for name, module in linear_modules(model).items():
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            named.setdefault(id(weight), []).append(name)
    return {name: next(n for n in names if n != name) for names in named.values() if len(names) > 1 for name in names}


def _example(shared: Mapping[str, str]) -> str:
    return " and ".join(next(iter(shared.items())))


def check_shared(model: PeftModel, shared: Mapping[str, str]) -> None:
    """Refuse adapters on layers that share their weight with another layer, by ``shared_layers`` of the base model.

    Raises:
        RecipeError: there are such adapters; the message names two of the layers.
    """
    wrappers = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    changed = [name for name, module in model.get_base_model().named_modules() if isinstance(module, wrappers)]
    adapted = {name: other for name, other in shared.items() if any(f"{name}.".startswith(f"{c}.") for c in changed)}
    if adapted:
        raise RecipeError(
            f"model.peft: {_example(adapted)} share their weight, as {len(adapted)} layers that the config matches do: "
            f"{_WHY}; leave them out (exclude_modules), or set target_modules to all-linear, which does"
        )


def check_wrapped(model: PeftModel, method: str) -> None:
    """Refuse targets that PEFT passes over in silence, as OSF does where a layer is no linear one.

    Raises:
        RecipeError: there is such a target.
    """
    base = model.get_base_model()
    names = model.base_model.targeted_module_names if isinstance(model.base_model, BaseTuner) else []
    for name in names:
        if not isinstance(layer := base.get_submodule(name), BaseTunerLayer):
            raise RecipeError(
                f"model.peft: {method} does not train {name} ({type(layer).__name__}) of {type(base).__name__}, and "
                "PEFT passes over it; leave it out of target_modules, or take peft.LoraConfig"
            )


def check_computed(model: PeftModel, method: str) -> None:
    """Refuse adapters that the model would not compute, or compute otherwise: PEFT adds them to whole products.

    Raises:
        RecipeError: there is such an adapter, on a layer whose weight is read past it, or, other than LoRA's on the
            weight, on one that multiplies groups of its inputs.
    """
    base = model.get_base_model()
    from_outside = read_from_outside(base.config)
    for name, module in base.named_modules():
        if not isinstance(module, BaseTunerLayer) or isinstance(module, ParamWrapper):
            continue
        if type(module.get_base_layer()).__name__ in _GROUPED:
            raise RecipeError(
                f"model.peft: {method} does not fit {name} of {type(base).__name__}, which multiplies groups of its "
                "inputs; leave it out of target_modules, or take peft.LoraConfig"
            )
        if is_norm_read_from_outside(base.config, name):
            raise RecipeError(
                f"model.peft: {type(base).__name__} reads the weight of {name} past an adapter, which would not train; "
                rf"leave such norms out (exclude_modules: '.*\.{name.split('.')[-2]}\.norm')"
            )
        if name.rpartition(".")[2] in from_outside:
            raise RecipeError(
                f"model.peft: {type(base).__name__} reads the weight of {name} past an adapter, which would not train; "
                "leave it out of target_modules, or set them to all-linear, which does"
            )


def check_loaded(model: PeftModel) -> None:
    """Refuse adapters that PEFT would not load from their files.

    Raises:
        RecipeError: there is such an adapter.
    """
    base = model.get_base_model()
    adapted = [n for n, m in base.named_modules() if isinstance(m, BaseTunerLayer) and not isinstance(m, ParamWrapper)]
    if lost := names_read_otherwise(model.active_peft_config, base, adapted):
        raise RecipeError(
            f"model.peft: {lost[0]} is one of {len(lost)} layers of {type(base).__name__} {_LOST}; leave them out "
            "(exclude_modules), or set target_modules to all-linear, which does"
        )


def name_layers(model: PreTrainedModel, peft: PeftConfig) -> None:
    """Replace ``target_modules: all-linear`` by layers' names if PEFT would miss some: GPTQ's are no ``nn.Linear``."""
    modules, requested = linear_modules(model), peft.to_dict().get("target_modules")
    if requested == "all-linear" and not all(isinstance(module, nn.Linear) for module in modules.values()):
        peft.target_modules = set(modules)
