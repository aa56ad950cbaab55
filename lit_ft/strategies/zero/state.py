"""Conversion of weights and optimizer states between ZeRO's flat partitions and full tensors, as without ZeRO.

Terms: ZeRO concatenates the weights of a parameter group and gives each rank one *partition* of them, in fp32 whatever
dtype the model computes in; a *piece* is the part of one parameter that lies in this rank's partition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.distributed.gather import full_shape, is_zero3, named_weights
from torch import Tensor, nn
from torch.nn.functional import pad

from lit_ft.checkpointing.storage.sharded import OptimizerState
from lit_ft.errors import RecipeError
from lit_ft.internals import deepspeed as deepspeed_internals

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Order = Sequence[Sequence[nn.Parameter]]
"""Parameters of each optimizer group, as the optimizer was created; states are numbered in this order."""


class Piece(NamedTuple):
    """Part of a parameter that lies in this rank's partition."""

    partition: Tensor
    """The partition, flat, fp32."""
    start: int
    """Index in the partition at which the piece starts."""
    first: int
    """Index of the piece's first element in the flattened parameter; past the end if the piece is padding only."""
    numel: int
    """Number of elements, padding included; 0 if this rank holds nothing of the parameter."""

    def of(self, full: Tensor) -> Tensor:
        """Elements of a tensor of the parameter's shape that belong to the piece, flat, padded with 0."""
        flat = full.flatten()[self.first : self.first + self.numel]
        return pad(flat, (0, self.numel - len(flat)))

    def within(self, flat: Tensor) -> Tensor:
        """View of the piece in a flat tensor with the layout of the partition."""
        return flat.narrow(0, self.start, self.numel)


# --- full states, for checkpoints ----------------------------------------------------------------


def weights(module: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Full trainable parameters by name, on the CPU, fp32; a collective. ``{}`` on ranks without ``keep``."""
    from deepspeed.utils import safe_get_full_fp32_param

    full_weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            full = safe_get_full_fp32_param(parameter)
            if keep:
                full_weights[name] = full.cpu()
    return full_weights


def optimizer_state(engine: DeepSpeedEngine, order: Order, keep: bool) -> OptimizerState:
    """State dict of the optimizer as it would be without ZeRO; a collective. ``{}`` on ranks without ``keep``."""
    states: dict[int, dict[str, object]] = {}
    if is_on_disk := deepspeed_internals.has_optimizer_on_disk(engine):
        rank_zero_warn(
            "optimizer states on NVMe are not saved: a run that resumes from the checkpoint starts them anew"
        )
    for index, (parameter, piece) in enumerate(_pieces(engine, [] if is_on_disk else order)):
        state = {}
        for key, value in engine.basic_optimizer.state[piece.partition].items():
            if not isinstance(value, Tensor):
                state[key] = value
            elif value.shape != piece.partition.shape:  # Adam's step counter
                state[key] = value.detach().cpu().clone()
            else:
                shape = full_shape(parameter)
                full = _fill(piece, value, torch.zeros(shape, dtype=value.dtype, device=engine.device))
                state[key] = full.cpu() if keep else None
        if state:
            states[index] = state
    return {"state": states, "param_groups": _numbered(engine, order)} if keep else {}


def _fill(piece: Piece, flat: Tensor, full: Tensor) -> Tensor:
    """Fill a full tensor with the pieces of all ranks; complete on rank 0 only."""
    # DeepSpeed's safe_get_full_optimizer_state handles only the first parameter group, at stages 1 and 2.
    here = full.flatten()[piece.first : piece.first + piece.numel]
    here.copy_(piece.within(flat)[: len(here)])
    dist.reduce(full, dst=0)
    return full


def _numbered(engine: DeepSpeedEngine, order: Order) -> list[dict[str, object]]:
    numbers = iter(range(sum(map(len, order))))
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [next(numbers) for _ in parameters],
        }
        for group, parameters in zip(engine.basic_optimizer.param_groups, order, strict=True)
    ]


# --- loading of full states ----------------------------------------------------------------------


@torch.no_grad()
def load_weights(module: nn.Module, saved: Mapping[str, Tensor], engine: DeepSpeedEngine) -> None:
    """Load full weights into the model and, where they are trained, into this rank's fp32 partition; a collective."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    own = dict(named_weights(module))
    for name, full in saved.items():
        parameter = own[name]
        trains = engine.basic_optimizer is not None and parameter.requires_grad
        if not is_zero3(parameter):
            parameter.copy_(full)
            if trains:
                safe_set_full_fp32_param(parameter, full.float())
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(full)
        if trains:
            piece = Piece(parameter, *deepspeed_internals.part_of(parameter))
            safe_set_local_fp32_param(parameter, piece.of(full.float()))
    deepspeed_internals.forget_second_copies(engine)


def load_optimizer_state(engine: DeepSpeedEngine, order: Order, saved: OptimizerState) -> None:
    """Convert a full optimizer state to the flat layout of this rank's partitions, and load it into the optimizer."""
    is_on_disk = deepspeed_internals.has_optimizer_on_disk(engine)
    if is_on_disk and saved["state"]:
        raise RecipeError(
            "a run cannot be resumed with optimizer states on NVMe (offload_optimizer_device=nvme); offload to cpu"
        )
    optimizer = engine.basic_optimizer
    flat: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    for index, (parameter, piece) in enumerate(_pieces(engine, [] if is_on_disk else order)):
        shape = full_shape(parameter)
        for key, value in saved["state"].get(index, {}).items():
            is_per_weight = isinstance(value, Tensor) and value.shape == shape and value.dim() > 0
            if not is_per_weight:
                flat[piece.partition][key] = value
                continue
            if key not in flat[piece.partition]:
                flat[piece.partition][key] = torch.zeros_like(piece.partition, dtype=value.dtype)
            piece.within(flat[piece.partition][key]).copy_(piece.of(value))
    for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    for partition, state in flat.items():
        optimizer.state[partition] = {
            key: value.to(partition.device) if key != "step" else value for key, value in state.items()
        }


def _pieces(engine: DeepSpeedEngine, order: Order) -> Iterator[tuple[nn.Parameter, Piece]]:
    for group, parameters in enumerate(order):
        for parameter in parameters:
            if is_zero3(parameter):
                partition, part = deepspeed_internals.partition_of(engine, parameter)
                yield parameter, Piece(partition, *part)
                continue
            partition = engine.basic_optimizer.param_groups[group]["params"][0]
            own = deepspeed_internals.slice_in_partition(parameter)
            yield parameter, Piece(partition, 0, 0, 0) if own is None else Piece(partition, *own)
