"""Attributes of DeepSpeed's engine and of the parameters that ZeRO has sharded, as read in DeepSpeed 0.19.

None of them is documented. The public ``deepspeed.utils.safe_get_full_optimizer_state`` knows only the first parameter
group at stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from lit_ft.internals.torch import forward_hooks

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class PartitionSlice(NamedTuple):
    """Position of this rank's part of a parameter in its partition, which is flat."""

    start: int
    """Index in the partition at which the part starts."""
    first: int
    """Index of the part's first element in the flattened parameter."""
    numel: int
    """Number of elements, padding included."""


def slice_in_partition(parameter: Any) -> PartitionSlice | None:
    """Position of a parameter in this rank's partition at stages 1 and 2; None if this rank holds nothing of it."""
    if (mapping := parameter._hp_mapping) is None:
        return None
    there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
    return PartitionSlice(there.start, here.start, here.numel)


def partition_of(engine: DeepSpeedEngine, parameter: Any) -> tuple[Tensor, PartitionSlice]:
    """Partition of this rank, fp32, that holds its part of a parameter at stage 3, and the position in it."""
    index, start, numel = engine.optimizer.grad_position[engine.optimizer.get_param_id(parameter)]
    part = PartitionSlice(start, numel * parameter.ds_zero_partition_rank, numel)
    return engine.optimizer.fp32_partitioned_groups_flat[index], part


def part_of(parameter: Any) -> PartitionSlice:
    """Part of a parameter that this rank holds at stage 3, in the parameter's own partition."""
    numel = parameter.partition_numel()
    return PartitionSlice(0, numel * parameter.ds_zero_partition_rank, numel)


def zero_gradient_buffer(engine: DeepSpeedEngine) -> None:
    """Set the buffer of gradients to zero after an optimizer step; only stage 3 has one.

    The first micro-batch of a step overwrites the buffer and later ones add to it: a parameter that the first does not
    use would get the gradient of the previous step again.
    """
    if (buffer := getattr(engine.optimizer, "grad_partitions_flat_buffer", None)) is not None:
        buffer.zero_()


def forget_second_copies(engine: DeepSpeedEngine) -> None:
    """Tell stage 3 that its second copies of weights (ZeRO++) are outdated."""
    if (forget := getattr(engine.optimizer, "invalidate_secondary_tensor", None)) is not None:
        forget()


def has_optimizer_on_disk(engine: DeepSpeedEngine) -> bool:
    """Whether stage 3 keeps the optimizer's state on NVMe."""
    return bool(getattr(engine.optimizer, "swap_optimizer", False))


def restore_linear() -> None:
    """Give ``torch.nn.functional.linear`` back, which stage 3 replaces for the whole process by one of its own.

    That one adds biases in place, to products that selective checkpointing of a later run would keep.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    if (linear := getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)) is not None:
        nn.functional.linear = linear


def stop_gathering_in_calls(engine: DeepSpeedEngine, modules: Collection[nn.Module]) -> None:
    """Remove the hooks by which stage 3 gathers the weights of modules for each of their calls."""
    hooks = {id(registered) for module in modules for registered in forward_hooks(module)}
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    for handle in [*offload.forward_hooks, *offload.backward_hooks]:
        if id(handle.hooks_dict_ref()) in hooks:
            handle.remove()
