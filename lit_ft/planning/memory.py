"""What a rank's memory holds under a strategy that splits the weights: counted, and where it says so, estimated."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_ft.gradient_norm import local
from lit_ft.planning import pipeline_timeline
from lit_ft.planning.communication import Step, bytes_of, sharded


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    """Its own, whether they train or not."""
    gathered: float
    """Of weights that ``fully_shard`` holds whole at a time."""
    gradients: float
    """Whole where they wait for other micro-batches, else as split as the weights."""
    optimizer: float
    """Its state after a step; ``nan`` where that cannot be told without weights."""
    layer_inputs: float
    """Estimated: what comes into each layer, for all micro-batches that wait for their backward pass. With activation
    checkpointing that is what a layer keeps; without, it keeps several times that."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(astuple(self))


def memory_of(
    strategy: Any, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Module], make_optimizer: Any, inputs: float
) -> Memory:
    """What this rank holds.

    Args:
        strategy: an ``FSDPStrategy`` or ``ModelParallelStrategy`` that has split the model.
        parameters: of the model, as they are here; they may be on the meta device.
        layers: the decoder layers here.
        make_optimizer: makes the optimizer from a list of parameters.
        inputs: of ``layer_inputs``.
    """
    accumulates = strategy.lightning_module.trainer.accumulate_grad_batches > 1
    trained = [p for p in parameters if p.requires_grad]
    waits = (accumulates and not getattr(strategy, "sync_each_micro_batch", False)) or _is_piped(strategy)
    return Memory(
        weights=bytes_of(parameters),
        gathered=_gathered(strategy, parameters, layers),
        gradients=_together(trained) if waits else bytes_of(trained),
        optimizer=optimizer_bytes(make_optimizer, trained),
        layer_inputs=inputs,
    )


def _is_piped(strategy: Any) -> bool:
    return getattr(strategy, "pipeline", None) is not None


def _together(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of what the ranks that share weights hold of them together."""
    return sum(sharded(p)[1] * p.element_size() for p in parameters)


def _gathered(strategy: Any, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Module]) -> int:
    dtype = strategy._precision_policy().param_dtype
    whole = {id(p): sharded(p)[1] * (dtype or p.dtype).itemsize for p in parameters if sharded(p)[0] > 1}
    if not strategy.reshard_after_forward or _is_piped(strategy):
        return sum(whole.values())
    of_layers = [sum(whole.pop(id(p), 0) for p in layer.parameters()) for layer in layers]
    return sum(whole.values()) + sum(sorted(of_layers)[-2:])  # the next layer comes while one is computed


def layer_inputs(strategy: Any, layers: int, hidden: int, itemsize: int, step: Step) -> float:
    """Bytes of what comes into layers, for all micro-batches between their forward and their backward pass.

    Args:
        strategy: that has split the model.
        layers: on this rank.
        hidden: size of a hidden state.
        itemsize: bytes of each of its elements.
        step: for the tokens of a row.
    """
    sizes = strategy.sizes() if hasattr(strategy, "sizes") else None
    ranks = 1 if sizes is None else sizes.context * (sizes.tensor if strategy.sequence_parallel else 1)
    row = step.tokens * hidden * itemsize * layers / ranks
    if sizes is None or not _is_piped(strategy):
        return row
    count, schedule = strategy.pipeline.micro_batches, strategy.schedule
    table = pipeline_timeline.timetable(schedule, sizes.pipeline, count)[strategy.pipeline.mesh.get_local_rank()]
    return row / count / len(strategy.pipeline.stages) * pipeline_timeline.most_in_flight(table)


def optimizer_bytes(make: Callable[[list[nn.Parameter]], Optimizer], trained: Sequence[nn.Parameter]) -> float:
    """Bytes of an optimizer's state after a step, taken on the meta device.

    Args:
        make: makes the optimizer from a list of parameters.
        trained: of which this rank's shards count.

    Returns:
        ``nan`` for an optimizer that does not run there.
    """
    shards = [nn.Parameter(torch.empty_like(local(p), device="meta")) for p in trained]
    for shard in shards:
        shard.grad = torch.empty_like(shard)
    try:
        optimizer = make(shards)
        optimizer.step()
    except Exception:  # of other packages: they may look at values, or want names
        return float("nan")
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return float(sum(value.numel() * value.element_size() for value in states))
