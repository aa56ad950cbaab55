"""Private API of torch, as read in torch 2.13."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed import Store
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all_single_autograd
from torch.distributed._functional_collectives import wait_tensor as wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

FLOAT8_ON_CPU: bool = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
"""Whether a CPU multiplies float8 matrices; with torch 2.11 it does not."""
HAS_ZERO_BUBBLE = torch.__version__ >= "2.13"
"""Whether zero-bubble schedules work with custom autograd functions in a layer."""
HAS_DEFERRED_REDUCTION = torch.__version__ >= "2.15"
"""Whether a pipeline schedule has the option to leave gradients unreduced, and does not always ask its stages."""
SHARDS_INTEGERS = torch.__version__ >= "2.12"
"""Whether ``fully_shard`` takes weights of integers; torch 2.11 lets each require gradients at first."""

M = TypeVar("M", bound=nn.Module)

# --- tensors -----------------------------------------------------------------------------------------


def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a scalar tensor in place, together.

    torch's public ``clip_grads_with_norm_`` takes parameters, not the local shards of their gradients.
    """
    torch._foreach_mul_(list(tensors), factor)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one; torch documents no public name for the base of a view."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def version_of(tensor: Tensor) -> int:
    """Number of changes of a tensor's values in place."""
    return tensor._version


def changed_arguments(func: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors that an operator changes in place, of its arguments."""
    for place, name in _written(func) if isinstance(func, OpOverload) else ():
        value = args[place] if place < len(args) else kwargs.get(name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


@cache
def _written(func: OpOverload) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(place, each.name) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write]


# --- attention ---------------------------------------------------------------------------------------

attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Flash attention on a CPU that also returns the logarithms of the sums in its softmax; SDPA keeps them to itself."""
attention_backward_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Gradients of ``attention_for_cpu``, from its results."""


def varlen_backward(
    rows: Sequence[Tensor],
    log_sums: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float | None,
    window_size: tuple[int, int],
) -> Sequence[Tensor]:
    """Gradients of q, k and v of ``varlen_attn``, from its results, whose sums may be others than the kernel returned.

    Args:
        rows: gradient of the output, queries, keys, values and the output, ``(T, heads, head_dim)`` each.
        log_sums: logarithms of the sums in the softmax, ``(heads, T)``.
        ends: cumulative lengths of the segments of queries and of keys.
        longest: tokens of the longest segment, of queries and of keys.
        scaling: ``scale`` of ``varlen_attn``; so is ``window_size``.
    """
    is_causal = window_size == (-1, 0)
    state = torch.zeros(2, dtype=torch.uint64, device=log_sums.device)  # of dropout, of which there is none
    return torch.ops.torch_attn._varlen_attn_backward(
        *rows, log_sums, *ends, *longest, is_causal, state, scaling, list(window_size)
    )


def operators_of_attention() -> list[OpOverload]:
    """Operators by which torch computes SDPA and ``varlen_attn``, for the selection of activations that are kept."""
    from torch.nn.attention import varlen  # noqa: F401  # registers its operator

    kernels = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    sdpa = [getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default for kernel in kernels]
    return [*sdpa, torch.ops.torch_attn._varlen_attn.default]


# --- modules -----------------------------------------------------------------------------------------


def own_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """Parameters of a module itself, by name: the dictionary in which the module looks them up.

    An entry may be replaced by a plain tensor for the time of a forward pass, which ``setattr`` refuses.
    """
    return module._parameters  # type: ignore[return-value]


def with_submodules(module: M, submodules: Mapping[str, nn.Module]) -> M:
    """Shallow copy of a module with some of its children replaced; the others, and all parameters, are shared.

    A public copy would copy the weights too.
    """
    part = copy.copy(module)
    part._modules = {**module._modules, **submodules}
    return part


def forward_hooks(module: nn.Module) -> tuple[dict[int, Callable[..., object]], dict[int, Callable[..., object]]]:
    """Dictionaries in which a module keeps the hooks before and after its forward pass; torch has no list of them."""
    return module._forward_pre_hooks, module._forward_hooks


@contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Context in which calls of a module run none of its forward hooks; only the handle of a hook can remove it."""
    hooks = forward_hooks(module)
    module._forward_pre_hooks, module._forward_hooks = type(hooks[0])(), type(hooks[1])()
    try:
        yield
    finally:
        module._forward_pre_hooks, module._forward_hooks = hooks


def is_in_backward() -> bool:
    """Whether a backward pass runs in this thread, as where activation checkpointing recomputes a forward pass."""
    return torch._C._current_graph_task_id() != -1


# --- schedules ---------------------------------------------------------------------------------------


def base_rates(schedule: LRScheduler) -> Iterator[list[Any]]:
    """Learning rates of all groups, before a schedule and before each of those that it consists of, to be changed.

    torch has no public name for the parts of ``SequentialLR`` and ``ChainedScheduler``.
    """
    if "base_lrs" in vars(schedule):
        yield schedule.base_lrs
    for part in vars(schedule).get("_schedulers", ()):
        yield from base_rates(part)


# --- torch.compile -------------------------------------------------------------------------------------


def compile_modes() -> dict[str, dict[str, bool]]:
    """Modes of torch.compile's default backend: the options that each one sets, by its name."""
    from torch._inductor import list_mode_options

    return {name: options for name, options in list_mode_options().items() if name != "default"}


def graph_breaks() -> tuple[type[Exception], ...]:
    """Errors of torch.compile with ``fullgraph`` for code that is not one graph; raised before any of it has run."""
    from torch._dynamo import exc

    return exc.Unsupported, exc.UncapturedHigherOrderOpError, exc.UserError, exc.FailOnRecompileLimitHit


def prepare_to_compile(graphs: int) -> None:
    """Let torch.compile make at least so many graphs of one function, and take floats for constants of a graph.

    Otherwise a float, such as the scaling of LoRA, is a tensor on the CPU that each backward pass copies to the device,
    and that a CUDA graph reads after it is gone (a crash with torch 2.11).
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, graphs)
    config.specialize_float = True


# --- process groups and device meshes -----------------------------------------------------------------


def fake_store() -> Store:
    """Store of a process group that is one process of many that do not run (backend ``fake``)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend

    return FakeStore()


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Mesh of one dimension over the ranks of a mesh of several; torch documents no public method."""
    return mesh._flatten(name)


def clear_mesh_caches() -> None:
    """Clear DTensor's caches; to be called before a new default process group is created.

    The keys are equal for meshes of equal shape, but the entries depend on the rank and name process groups. After
    ``destroy_process_group`` these names belong to other groups or to none.
    """
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
