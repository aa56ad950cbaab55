"""Weights and buffers that stay in float32 in a model that is cast, e.g. those of routers.

Precision bf16-true and DeepSpeed cast all that a module holds. transformers keeps some of it in float32 where it loads
a model in bfloat16: rotary frequencies in bfloat16 give tokens wrong positions, and a router's bias other experts.
"""

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_ft.model.isolation import architectures

_Module = TypeVar("_Module", bound=nn.Module)


def keep(model: nn.Module, weights: Set[str] = frozenset()) -> None:
    """Let frozen weights and buffers of a model that are in float32 stay in it when a module around them is cast.

    Trained weights are cast: DeepSpeed and FSDP join those of a layer, and all strategies give the same numbers.

    Args:
        model: model, changed in place; parts of it that were given before stay as they are.
        weights: names of the weights; of buffers, all stay.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {name for name, _ in module.named_parameters(recurse=False) if prefix + name in weights}
        has_buffers = any(buffer.dtype == torch.float32 for buffer in module.buffers(recurse=False))
        if (own or has_buffers) and _kept(module) is None:
            # A copy of the module gets a call of its own: the arguments of a partial are copied too.
            module._apply = partial(_apply, module, frozenset(own))


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Context after which frozen weights that stay in float32 are as they were before."""
    kept = [
        (parameter, parameter.data)
        for module in model.modules()
        for name in _kept(module) or ()
        if not (parameter := module.get_parameter(name)).requires_grad
    ]
    yield
    for parameter, data in kept:
        parameter.data = data


def warn_of_rounded(model: PreTrainedModel) -> None:
    """Print which weights that were to stay in float32 are in half precision: trained ones, and all at ZeRO's stage 3.

    Raises:
        RecipeError: the model cannot compute with them.
    """
    rounded = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in sorted(_kept(module) or ())
        if module.get_parameter(name).dtype != torch.float32
    ]
    if rounded:
        holds = (
            f"weights that transformers keeps in float32 are in half precision ({len(rounded):,}: {rounded[0]}, ...); "
            "trainer.precision=32-true keeps them too, except at stage=3 of DeepSpeed"
        )
        architectures.check_rounded(model.config, holds)
        rank_zero_warn(f"{holds}; the loss differs from that of the served model where rounding them changes it")


def _kept(module: nn.Module) -> frozenset[str] | None:
    """Names of a module's own weights that stay in float32; None if nothing of it was to."""
    call = vars(module).get("_apply")
    return call.args[1] if isinstance(call, partial) and call.func is _apply else None


def _apply(module: _Module, weights: frozenset[str], fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Module:
    own = [*module.buffers(recurse=False), *(p for n, p in module.named_parameters(recurse=False) if n in weights)]
    kept = {id(tensor) for tensor in own if tensor.dtype == torch.float32 and not tensor.requires_grad}

    def moved(tensor: Tensor) -> Tensor:
        new = fn(tensor)
        return tensor.to(new.device) if id(tensor) in kept and new.dtype != torch.float32 else new

    return type(module)._apply(module, moved, recurse)
