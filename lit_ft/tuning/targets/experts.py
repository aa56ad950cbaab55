"""Fused experts and routers of mixture-of-experts models, as targets of tuning methods.

transformers 5 keeps the experts of a layer in one tensor per projection, which is no linear layer: ``target_modules``
does not reach it, ``target_parameters`` does.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lit_callbacks.distributed.gather import full_numel, full_shape
from lit_callbacks.internals.transformers_internals import is_quantized
from peft import LoraConfig, PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals.peft import renamed_targets
from lit_ft.model.architecture import Architecture
from lit_ft.model.quantization import linear_modules
from lit_ft.tuning.lora.expert_lora import wrapped_parameters
from lit_ft.tuning.targets import patterns
from lit_ft.tuning.targets.all_linear import grouped_layers

MIB = 2**20


@dataclass(frozen=True)
class ExpertLayer:
    """Experts and router of one layer."""

    name: str
    """Path of the module that holds the experts, without PEFT's wrappers."""
    module: nn.Module
    """Module that the layer calls: the experts, or PEFT's wrapper around them."""
    holder: nn.Module
    """Module that holds the experts."""
    tensors: dict[str, nn.Parameter]
    """Fused weights by name, ``(experts, ., .)`` each."""
    router: dict[str, nn.Parameter]
    """Parameters of the router, an adapter's included, by their paths."""

    @property
    def count(self) -> int:
        """Number of experts, those on other ranks included."""
        return full_shape(next(iter(self.tensors.values())))[0]


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Layers of a model that have fused experts, in the order of the model."""
    layers = []
    for path, parent in model.named_modules():
        if isinstance(parent, BaseTunerLayer):
            continue
        for name, child in parent.named_children():
            holder = child.get_base_layer() if isinstance(child, BaseTunerLayer) else child
            tensors = {key: p for key, p in holder.named_parameters(recurse=False) if _is_fused(holder, p)}
            if tensors:
                router = _router(path, parent, name, full_shape(next(iter(tensors.values())))[0])
                layers.append(ExpertLayer(_join(path, name), child, holder, tensors, router))
    return layers


def _is_fused(holder: nn.Module, parameter: nn.Parameter) -> bool:
    shape = full_shape(parameter)
    return len(shape) == 3 and shape[0] > 1 and not isinstance(holder, nn.Conv1d)


def _router(path: str, block: nn.Module, experts: str, count: int) -> dict[str, nn.Parameter]:
    """Parameters of the modules beside the experts that have a row of weights for each of them."""
    beside = {name: child for name, child in block.named_children() if name != experts and "shared" not in name}
    routers = {
        name: child
        for name, child in beside.items()
        if any(len(shape := full_shape(p)) == 2 and shape[0] == count for p in child.parameters())
    }
    return {
        _join(path, name, key): parameter
        for name, child in routers.items()
        for key, parameter in child.named_parameters()
    }


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def short_names(model: nn.Module) -> list[str]:
    """Names of the fused tensors as ``target_parameters`` takes them, e.g. ``mlp.experts.down_proj`` of all layers."""
    paths = [f"{layer.name}.{key}" for layer in expert_layers(model) for key in layer.tensors]
    return list(dict.fromkeys(re.split(r"\.\d+\.", path)[-1] for path in paths))


def advice(model: nn.Module) -> str:
    """The setting that trains a model's experts."""
    return f"target_parameters: [{', '.join(short_names(model))}]"


# --- what a config targets ---------------------------------------------------------------------------


def check_target_parameters(model: nn.Module, peft: PeftConfig) -> None:
    """Refuse ``target_parameters`` that the model lacks, or with options that would not hold for them.

    Raises:
        RecipeError: a name matches no parameter, or an option does not go together with them.
    """
    if not isinstance(peft, LoraConfig) or not peft.target_parameters:
        return
    names = [name for name, _ in model.named_parameters()]
    targets = peft.target_parameters
    if unmatched := sorted(t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)):
        matrices = sorted({re.split(r"\.\d+\.", name)[-1] for name, p in model.named_parameters() if p.ndim == 2})
        raise RecipeError(
            f"model.peft target_parameters {unmatched} match nothing in {type(model).__name__}; its experts are "
            f"{short_names(model)}, its matrices {matrices}"
        )
    _check_options_of_parameters(peft, "target_parameters")
    if peft.layers_to_transform is not None:
        raise RecipeError(
            f"model.peft: layers_to_transform={peft.layers_to_transform} does not limit target_parameters (peft 0.21); "
            f"give their full names, e.g. {next(n for n in names if any(n.endswith(t) for t in targets))}"
        )


_OF_OUTPUTS: Mapping[str, float | bool] = {"lora_dropout": 0, "use_dora": False, "lora_bias": False}
"""Options that a product which is added to the weights does not have, with the values that leave them out."""


def _check_options_of_parameters(peft: LoraConfig, of: str, otherwise: str = "") -> None:
    for name, without in _OF_OUTPUTS.items():
        if (value := getattr(peft, name)) != without:
            raise RecipeError(
                f"model.peft: {name}={value} with {of}: PEFT adds their products to the weights, where it has no "
                f"{name}; set {name} to {str(without).lower()}{otherwise}"
            )


def resolve_targets(model: PreTrainedModel, peft: PeftConfig) -> None:
    """Let ``target_modules`` mean linear layers, whatever the model: routers and fused experts are named by themselves.

    For models whose experts were linear layers in transformers 4, PEFT moves ``gate_proj``, ``up_proj`` and
    ``down_proj`` to the fused experts, away from the linear layers that still have these names (shared experts, dense
    layers), reads ``all-linear`` as experts and router too, and widens a pattern to all layers. Linear layers of these
    names are given as parameters here, which PEFT leaves alone; so are those that multiply groups of their inputs.
    ``peft`` is changed in place.

    Raises:
        RecipeError: nothing is targeted, or an option does not go together with parameters.
    """
    layers = expert_layers(model)
    if not isinstance(peft, LoraConfig) or not layers or not peft.target_modules:
        return
    routers = {name.rpartition(".")[0] for layer in layers for name in layer.router}
    if peft.target_modules == "all-linear":
        named = [name for name in linear_modules(model) if name not in routers and not _is_excluded(peft, name)]
    else:
        known = {*linear_modules(model), *routers}
        named = [name for name, _ in model.named_modules() if name in known and check_target_module_exists(peft, name)]
    if not named and not peft.target_parameters:
        last = sorted({name.rsplit(".", 1)[-1] for name in linear_modules(model)})
        raise RecipeError(
            f"model.peft: target_modules={peft.target_modules!r} matches no linear layer of {type(model).__name__}, "
            f"which are {last}; its experts train by {advice(model)}"
        )
    moved = renamed_targets(model)
    grouped = grouped_layers(model)
    apart = [n for n in named if n in routers or n in grouped or n.rsplit(".", 1)[-1] in moved]
    if apart:
        last = sorted({name.rsplit(".", 1)[-1] for name in apart})
        of = f"{', '.join(last)} of {type(model).__name__}, which PEFT adapts as parameters"
        _check_options_of_parameters(peft, of, f", or exclude_modules to [{', '.join(last)}]")
        patterns.extend_to_parameters(peft, apart)
    if apart or (moved and isinstance(peft.target_modules, str)) or peft.target_modules == "all-linear":
        peft.target_modules = set(named) - set(apart)
        peft.target_parameters = (
            sorted({*(peft.target_parameters or ()), *(f"{name}.weight" for name in apart)}) or None
        )


def _is_excluded(peft: LoraConfig, name: str) -> bool:
    probe = LoraConfig(target_modules=".*", exclude_modules=peft.exclude_modules, modules_to_save=peft.modules_to_save)
    return not check_target_module_exists(probe, name)


# --- what is said ------------------------------------------------------------------------------------


def describe(base: PreTrainedModel, has_router_loss: bool) -> list[str]:
    """Lines about experts and routers: their number, and which of them train; none for a dense model."""
    if not (layers := expert_layers(base)):
        return []
    router_trains = any(p.requires_grad for layer in layers for p in layer.router.values())
    routers = "routers train" if router_trains else "routers are frozen"
    if has_router_loss and not router_trains:
        routers += ", so their auxiliary loss moves the layers before them alone"
    per_token = Architecture.of(base.config).experts_per_token
    lines = [
        f"mixture of experts, {layers[0].count} a layer and {per_token} a token: {routers}; {_of_experts(base, layers)}"
    ]
    dense = [p for layer in layers for p in layer.tensors.values() if p.is_floating_point()]
    if is_quantized(base) and dense:
        size = sum(full_numel(p) * p.element_size() for p in dense) / MIB
        kind = str(dense[0].dtype).removeprefix("torch.")
        lines.append(f"fused experts are no linear layers and are not quantized: they take {size:,.1f} MiB in {kind}")
    return lines


def _of_experts(base: nn.Module, layers: Sequence[ExpertLayer]) -> str:
    if any(p.requires_grad for layer in layers for p in layer.tensors.values()):
        return "experts train in full"
    adapted = {w.parameter_name for layer in layers for w in wrapped_parameters(layer.module)}
    if adapted:
        return f"experts train by LoRA on {', '.join(sorted(adapted))}"
    return f"experts are frozen (target_modules reaches linear layers; {advice(base)} trains them by LoRA)"
