"""Memory of a rank: counted, except where it is marked as estimated."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_ft.gradient_norm import local
from lit_ft.planning import pipeline_timeline
from lit_ft.planning.communication import Step, bytes_of, sharded
from lit_ft.planning.layout import Layout, Replication


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    """This rank's weights, trainable and frozen."""
    gathered: float
    """Full weights of sharded ones that are held at the same time."""
    gradients: float
    """Gradients: full if they accumulate over micro-batches, else sharded like the weights."""
    optimizer: float
    """Optimizer state after a step, and its float32 copies of weights; ``nan`` if it cannot be computed without the
    weights' values."""
    layer_inputs: float
    """Estimated: inputs of all layers, for all micro-batches that wait for their backward pass. With activation
    checkpointing a layer keeps no more than its input; without, it keeps several times as much."""

    @property
    def total(self) -> float:
        """Sum of all fields."""
        return sum(astuple(self))


def memory_of(
    layout: Layout,
    parameters: Sequence[nn.Parameter],
    layers: Sequence[nn.Module],
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    inputs: float,
    accumulates: bool,
) -> Memory:
    """Memory of this rank.

    Args:
        layout: layout of the distributed model.
        parameters: parameters of the model on this rank; they may be on the meta device.
        layers: decoder layers of this rank.
        make_optimizer: function that creates the optimizer from a list of parameters.
        inputs: bytes of the layers' inputs, as ``layer_inputs`` returns them.
        accumulates: whether an optimizer step has several micro-batches.
    """
    trained = [p for p in parameters if p.requires_grad]
    waits = (accumulates and not layout.sync_each_micro_batch) or bool(layout.stages)
    return Memory(
        weights=bytes_of(parameters),
        gathered=_gathered(layout, parameters, layers),
        gradients=_together(trained) if waits else bytes_of(trained),
        optimizer=optimizer_bytes(make_optimizer, trained),
        layer_inputs=inputs,
    )


def replicated_memory(
    split: Replication,
    parameters: Sequence[nn.Parameter],
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    inputs: float,
) -> Memory:
    """Memory of a rank that computes with the full model: one device, DDP, or ZeRO, whose ranks share parts of it out.

    ZeRO divides by the number of ranks the optimizer's state (stage 1), also the gradients (2), also the weights (3):
    Rajbhandari et al. 2020, arXiv:1910.02054, section 5.

    Args:
        split: numbers of ranks that each part is split over.
        parameters: parameters of the full model; they may be on the meta device.
        make_optimizer: function that creates the optimizer from a list of parameters.
        inputs: bytes of the layers' inputs, as ``layer_inputs`` returns them.
    """
    sizes = [(p.requires_grad, p.numel(), (split.dtype or p.dtype).itemsize) for p in parameters]
    weights = sum(count * itemsize for _, count, itemsize in sizes)
    trained = sum(count * itemsize for trains, count, itemsize in sizes if trains)
    optimized = [p for p in parameters if p.requires_grad]
    copies = 0
    if split.has_float32_copy:
        optimized = [nn.Parameter(torch.empty(p.shape, device="meta")) for p in optimized]
        copies = bytes_of(optimized)
    largest = max((itemsize for *_, itemsize in sizes), default=0)
    return Memory(
        weights=0 if "weights" in split.on_host else weights / split.weights,
        gathered=min(weights, split.gathered_elements * largest),
        gradients=trained * split.gradient_copies / split.gradients,
        optimizer=0
        if "optimizer" in split.on_host
        else (copies + optimizer_bytes(make_optimizer, optimized)) / split.optimizer,
        layer_inputs=inputs,
    )


def _together(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of parameters before they were sharded over data-parallel ranks."""
    return sum(sharded(p)[1] * p.element_size() for p in parameters)


def _gathered(layout: Layout, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Module]) -> int:
    dtype = layout.precision.param_dtype
    whole = {id(p): sharded(p)[1] * (dtype or p.dtype).itemsize for p in parameters if sharded(p)[0] > 1}
    if not layout.reshard_after_forward or layout.stages:
        return sum(whole.values())
    of_layers = [sum(whole.pop(id(p), 0) for p in layer.parameters()) for layer in layers]
    return sum(whole.values()) + sum(sorted(of_layers)[-2:])  # the next layer is gathered while one is computed


def layer_inputs(layout: Layout, layers: int, hidden: int, itemsize: int, step: Step) -> float:
    """Bytes of the layers' inputs, for all micro-batches between their forward and their backward pass.

    Args:
        layout: layout of the distributed model.
        layers: number of layers on this rank.
        hidden: number of elements of a hidden state.
        itemsize: bytes of an element.
        step: amount of data in an optimizer step.
    """
    ranks = layout.sizes.context * (layout.sizes.tensor if layout.sequence_parallel else 1)
    of_batch = step.tokens * hidden * itemsize * layers / ranks
    if not layout.stages:
        return of_batch
    count = layout.micro_batches
    table = pipeline_timeline.timeline(layout.schedule, layout.sizes.pipeline, count)[layout.pipeline_rank]
    return of_batch / count / len(layout.stages) * pipeline_timeline.most_in_flight(table)


def optimizer_bytes(make: Callable[[list[nn.Parameter]], Optimizer], trained: Sequence[nn.Parameter]) -> float:
    """Bytes of an optimizer's state after one step, which runs on the meta device.

    Args:
        make: function that creates the optimizer from a list of parameters.
        trained: trainable parameters, of which only this rank's shards count.

    Returns:
        Bytes; ``nan`` for an optimizer that does not run on the meta device.
    """
    shards = [nn.Parameter(torch.empty_like(local(p), device="meta")) for p in trained]
    for shard in shards:
        shard.grad = torch.empty_like(shard)
    try:
        optimizer = make(shards)
        optimizer.step()
    except Exception:  # optimizers of other packages may read values, or need parameter names
        return float("nan")
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return float(sum(value.numel() * value.element_size() for value in states))
