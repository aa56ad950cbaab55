"""Layout of a distributed model, as a strategy publishes it and as it is planned without processes."""

from collections.abc import Sequence
from dataclasses import dataclass

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
