"""Layout of a distributed model, as a strategy publishes it and as it is planned without processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from lit_ft.strategies.parallel.mesh import MeshSizes


@dataclass(frozen=True)
class Stage:
    """A pipeline stage on this rank."""

    index: int
    layers: range
    """Indices of its decoder layers."""
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Layout:
    """How a strategy has distributed a model, as seen from one rank."""

    base: PreTrainedModel
    """Hugging Face model, of which this rank holds a part."""
    sizes: MeshSizes
    precision: MixedPrecisionPolicy
    """Dtypes in which weights are gathered and gradients reduced."""
    reshard_after_forward: bool
    """Whether gathered weights of a layer are freed after its forward pass."""
    sync_each_micro_batch: bool = False
    """Whether gradients are reduced after every micro-batch, not once per optimizer step."""
    sequence_parallel: bool = False
    loss_parallel: bool = False
    expert_parallel_size: int = 1
    schedule: str = ""
    """Name of the pipeline schedule."""
    micro_batches: int = 1
    """Number of pipeline micro-batches that a packed batch is split into."""
    pipeline_rank: int = 0
    stages: Sequence[Stage] = ()
    """Stages of this rank; empty without a pipeline."""
    tied_copies: Sequence[nn.Parameter] = ()
    """Weights of this rank that another stage holds too, so that their gradients are summed."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.sizes.pipeline * self.sizes.data * self.sizes.context * self.sizes.tensor


@dataclass(frozen=True)
class Replication:
    """Numbers of data-parallel ranks that each part is split over, where a rank computes with the full model."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    gradient_copies: int = 1
    """Copies of the gradients on a rank: DDP reduces them in buckets beside them, unless these are views."""
    dtype: torch.dtype | None = None
    """Dtype that all weights are cast to; None keeps theirs."""
    has_float32_copy: bool = False
    """Whether the optimizer steps on a float32 copy of what trains, which it holds with its state."""
    gathered_elements: int = 0
    """Largest number of elements of sharded weights that are gathered at the same time."""
    on_host: frozenset[str] = frozenset()
    """Parts that are in host memory: ``weights``, ``optimizer``."""
