"""Products in float32 that autocast would round to bfloat16: those of routers and hyper-connections.

transformers computes them in float32 where a model is loaded in bfloat16. Autocast rounds weights, inputs and result:
in training, tokens would choose other experts than in the model that is served.
"""

from collections.abc import Callable, Set
from functools import partial
from types import MethodType

import torch
from torch import nn

from lit_ft.internals.transformers import casts_weight_to_float32


def keep(model: nn.Module, in_float32: Set[str]) -> None:
    """Let the modules of a model that transformers computes in float32 do so under autocast too.

    These are the modules all of whose weights transformers keeps in float32, and routers that cast theirs to it. With
    such weights, and inputs in bfloat16, they run in every model that is loaded in bfloat16, without autocast.

    Args:
        model: model, changed in place.
        in_float32: names of the weights that stay in float32 where the model is loaded in bfloat16.
    """

    def keep_within(module: nn.Module, path: str) -> None:
        weights = dict(module.named_parameters(prefix=path))
        is_whole = any(p.ndim > 1 for p in weights.values()) and weights.keys() <= in_float32
        if is_whole or casts_weight_to_float32(module):
            # No closures, which a copy of the module would share. Layers share a graph of torch.compile with a method.
            own = vars(module).get("forward")  # what keeps samples apart
            method = MethodType(_forward, module)
            module.forward = method if own is None else partial(_without_autocast, module, own)
            return
        for name, part in module.named_children():
            keep_within(part, f"{path}.{name}" if path else name)

    keep_within(model, "")


def kept_modules(module: nn.Module) -> list[nn.Module]:
    """Modules that compute in float32 under autocast, within one, each with PEFT's wrapper around it."""
    found = []
    for path, part in module.named_modules():
        if _is_kept(part.forward):
            while path.endswith(".base_layer"):  # PEFT wraps a module once for each of its parameters
                path = path.removesuffix(".base_layer")
            found.append(module.get_submodule(path))
    return found


def _is_kept(forward: Callable[..., object]) -> bool:
    is_method = isinstance(forward, MethodType) and forward.__func__ is _forward
    return is_method or (isinstance(forward, partial) and forward.func is _without_autocast)


def _forward(module: nn.Module, *args: object, **kwargs: object) -> object:
    with torch.autocast(next(module.parameters()).device.type, enabled=False):
        return type(module).forward(module, *args, **kwargs)


def _without_autocast(module: nn.Module, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    with torch.autocast(next(module.parameters()).device.type, enabled=False):
        return forward(*args, **kwargs)
