"""Parallel layout of a Megatron checkpoint: which rank file has which layers, experts and rows."""

from dataclasses import dataclass
from typing import NamedTuple

from lit_ft.errors import RecipeError
from lit_ft.megatron.shape import ModelShape


class Rank(NamedTuple):
    """Position of a rank file."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True)
class Layout:
    """Sizes of Megatron's parallel dimensions.

    Args:
        tensor_parallel: Megatron's --tensor-model-parallel-size.
        pipeline_parallel: Megatron's --pipeline-model-parallel-size.
        expert_parallel: Megatron's --expert-model-parallel-size.
        virtual_pipeline: Megatron's --num-virtual-stages-per-pipeline-rank.
        first_stage_layers: Megatron's --decoder-first-pipeline-num-layers; None divides evenly.
        last_stage_layers: Megatron's --decoder-last-pipeline-num-layers; None divides evenly.
        vocabulary_multiple: Megatron's --make-vocab-size-divisible-by; rows are padded to a multiple of it times
            tensor_parallel.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    vocabulary_multiple: int = 128

    def padded(self, vocabulary: int) -> int:
        """Number of rows of the embedding."""
        unit = self.vocabulary_multiple * self.tensor_parallel
        return -(-vocabulary // unit) * unit

    def ranks(self) -> list[Rank]:
        """All rank files."""
        return [
            Rank(t, p, e)
            for p in range(self.pipeline_parallel)
            for e in range(self.expert_parallel)
            for t in range(self.tensor_parallel)
        ]

    def folder_of(self, rank: Rank) -> str:
        """Name of a rank's folder, e.g. ``mp_rank_00_001``: Megatron leaves out dimensions of size 1."""
        pipeline = f"_{rank.pipeline:03d}" if self.pipeline_parallel > 1 else ""
        expert = f"_{rank.expert:03d}" if self.expert_parallel > 1 else ""
        return f"mp_rank_{rank.tensor:02d}{pipeline}{expert}"

    def layers_of_ranks(self, layers: int) -> list[int]:
        """Number of layers of each pipeline rank.

        Raises:
            RecipeError: they cannot be divided.
        """
        ends = (
            {0: self.first_stage_layers, self.pipeline_parallel - 1: self.last_stage_layers}
            if self.pipeline_parallel > 1
            else {}
        )
        given = {stage: count for stage, count in ends.items() if count is not None}
        between = self.pipeline_parallel - len(given)
        rest = layers - sum(given.values())
        if rest < between or (rest if between == 0 else rest % between):
            raise RecipeError(
                f"{layers} layers do not divide among pipeline_parallel={self.pipeline_parallel} ranks"
                + (f" of which {len(given)} have {list(given.values())}" if given else "")
                + "; name first_stage_layers and last_stage_layers so that the others have equally many"
            )
        counts = [given.get(stage, rest // between if between else 0) for stage in range(self.pipeline_parallel)]
        if any(count % self.virtual_pipeline for count in counts):
            raise RecipeError(
                f"virtual_pipeline={self.virtual_pipeline} must divide the {counts} layers of the pipeline ranks; "
                "name a divisor"
            )
        return counts

    def stages(self, layers: int) -> dict[tuple[int, int], range]:
        """Layers of each pipeline rank and virtual stage, in the order in which a token passes them."""
        counts, first = self.layers_of_ranks(layers), 0
        stages = {}
        for virtual in range(self.virtual_pipeline):
            for pipeline, count in enumerate(counts):
                stages[pipeline, virtual] = range(first, first := first + count // self.virtual_pipeline)
        return stages

    def experts_of(self, rank: Rank, experts: int) -> range:
        """Experts of a rank."""
        count = experts // self.expert_parallel
        return range(rank.expert * count, (rank.expert + 1) * count)

    def check(self, shape: ModelShape) -> None:
        """Check that a model's sizes can be divided.

        Raises:
            RecipeError: a size does not divide; the message names it.
        """
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise RecipeError(f"{name}={value} must be at least 1; name another size")
        sizes = {
            "num_key_value_heads": shape.groups,
            "num_attention_heads": shape.heads,
            "intermediate_size": shape.ffn,
        }
        for name, size in sizes.items():
            if size % self.tensor_parallel:
                raise RecipeError(f"tensor_parallel={self.tensor_parallel} must divide {name}={size}; name a divisor")
        if self.expert_parallel > 1 and not shape.experts:
            raise RecipeError(f"expert_parallel={self.expert_parallel} is for models with experts; leave it out")
        if shape.experts % self.expert_parallel:
            raise RecipeError(
                f"expert_parallel={self.expert_parallel} must divide {shape.experts} experts; name a divisor"
            )
        if self.pipeline_parallel == 1 and (
            self.virtual_pipeline > 1 or self.first_stage_layers or self.last_stage_layers
        ):
            raise RecipeError("virtual_pipeline, first_stage_layers and last_stage_layers need pipeline_parallel > 1")
        self.layers_of_ranks(shape.layers)
