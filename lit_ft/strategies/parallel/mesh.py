"""Sizes of the device mesh, and checks that a model and its batches fit them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.internals.transformers_internals import is_quantized
from torch import nn
from transformers import PreTrainedModel

from lit_ft.balanced_partition import split_evenly
from lit_ft.errors import RecipeError
from lit_ft.internals import torch as torch_internals
from lit_ft.model import rotary_embedding
from lit_ft.model.activations.checkpointing import Checkpointing
from lit_ft.model.architecture import head_layer
from lit_ft.model.attention.packed_attention import PACKED
from lit_ft.model.isolation import token_mixers
from lit_ft.model.loading import decoder_of, pick_attention
from lit_ft.protocols import SplitsForward
from lit_ft.strategies.parallel import expert_parallel, pipeline_parallel, tensor_plan
from lit_ft.training.spec import TrainingSpec, spec_of
from lit_ft.tuning import compatibility
from lit_ft.tuning.lora import expert_lora

Size = int | Literal["auto"]
"""Number of ranks along a dimension of the mesh; auto is what the other dimensions leave."""


class RequestedSizes(NamedTuple):
    """Number of ranks along each dimension of the mesh that a recipe requests; at most one is ``auto``."""

    pipeline: Size
    data: Size
    context: Size
    tensor: Size


class MeshSizes(NamedTuple):
    """Number of ranks along each dimension of the mesh, from the outermost to the innermost."""

    pipeline: int
    data: int
    context: int
    tensor: int


_DIMENSION_OF = {
    **dict.fromkeys(("schedule", "num_microbatches", "layers_per_stage"), "pipeline"),
    **dict.fromkeys(("tp_plan", "sequence_parallel", "loss_parallel"), "tensor"),
}
"""Dimension of the mesh that an option is for."""


@dataclass(frozen=True)
class ParallelDims:
    """Parallel layout that a recipe requests; the fields are the arguments of ``ModelParallelStrategy``."""

    requested: RequestedSizes
    expert_parallel_size: int
    schedule: str = "1F1B"
    num_microbatches: int | None = None
    layers_per_stage: Sequence[int] | None = None
    tp_plan: Mapping[str, str] | None = None
    sequence_parallel: bool = False
    loss_parallel: bool = True

    def __post_init__(self) -> None:
        if self.schedule not in pipeline_parallel.SCHEDULES:
            raise RecipeError(
                f"trainer.strategy schedule={self.schedule!r} is unknown; use one of {pipeline_parallel.SCHEDULES}"
            )
        for name in ("expert_parallel_size", "num_microbatches"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise RecipeError(f"trainer.strategy {name}={value} must be 1 or more")

    def check_batches(self, sizes: MeshSizes, samples: int | None, module: nn.Module) -> None:
        """Check the number of pipeline micro-batches.

        Raises:
            RecipeError: the number does not fit; the message names the value, the rule and what works.
        """
        self._say_what_is_vain(sizes)
        if sizes.pipeline == 1:
            return
        count = self.micro_batches(sizes, samples)
        if count < sizes.pipeline:
            fix = "data.micro_batch_size to" if self.num_microbatches is None else "it to null or to"
            raise RecipeError(
                f"trainer.strategy num_microbatches={count} leaves stages idle: a pipeline of {sizes.pipeline} needs "
                f"as many at least; set {fix} a multiple of {sizes.pipeline}"
            )
        if samples is not None and samples % count:
            fitting = [n for n in range(sizes.pipeline, samples + 1) if samples % n == 0]
            raise RecipeError(
                f"trainer.strategy num_microbatches={count} must divide data.micro_batch_size={samples}; use one of "
                f"{fitting}, or set data.micro_batch_size to {count * max(1, round(samples / count))}"
            )
        if not isinstance(module, SplitsForward):
            raise RecipeError(
                f"pipeline_parallel_size={sizes.pipeline} needs a module with hidden_states(batch, decoder) and "
                f"token_loss(hidden, batch), as lit_ft.CausalLM has; {type(module).__name__} has not"
            )

    def _say_what_is_vain(self, sizes: MeshSizes) -> None:
        """Say which options are given for a pipeline or for tensor parallelism that these sizes do not have."""
        defaults = {field.name: field.default for field in fields(self)}
        for name, kind in _DIMENSION_OF.items():
            if (value := getattr(self, name)) != defaults[name] and getattr(sizes, kind) == 1:
                rank_zero_warn(
                    f"trainer.strategy {name}={value} has no effect with {kind}_parallel_size=1; leave it out, or "
                    "raise that size"
                )

    def check_model(self, sizes: MeshSizes, module: nn.Module, skeleton: nn.Module) -> None:
        """Refuse models that cannot be distributed over the mesh; the skeleton has its adapters, on the meta device.

        Raises:
            RecipeError: the model does not fit; the message names the value, the rule and what works.
        """
        base, spec = base_of(skeleton), spec_of(module)
        for peft in compatibility.configs_in(skeleton):
            for name, size in sizes._asdict().items():
                if size > 1:
                    situation = "fsdp" if name == "data" else name
                    compatibility.check_situation(peft, situation, f"{name}_parallel_size={size}")
        self._check_parameters(sizes, spec, base)
        _check_mixers(sizes, base)
        for name in ("data", "context"):
            if spec is not None and getattr(sizes, name) > 1:
                spec.base.check_shards(f"{name}_parallel_size={getattr(sizes, name)}")
        if sizes.tensor > 1:
            self._check_tensor(sizes.tensor, spec, base)
        if self.expert_parallel_size > 1:
            self._check_experts(sizes, base)
        splits_tokens = sizes.data < math.prod(sizes) or self.expert_parallel_size > 1
        if spec is not None and spec.router_aux_loss is not None and splits_tokens:
            raise RecipeError(
                f"model.router_aux_loss={spec.router_aux_loss} needs the router's choices for all tokens of a "
                "packed batch, which pipeline, tensor, context and expert parallelism split over ranks; leave it "
                "out, or take lit_ft.strategies.FSDPStrategy"
            )
        if sizes.context > 1:
            _check_context(sizes.context, module, base)
        if sizes.pipeline > 1:
            if self.schedule in pipeline_parallel.ZERO_BUBBLE:
                self._check_zero_bubble(None if spec is None else spec.gradient_checkpointing)
            self._check_stages(sizes, base)

    def _check_parameters(self, sizes: MeshSizes, spec: TrainingSpec | None, base: PreTrainedModel) -> None:
        """Refuse LoRA on parameters (``target_parameters``) that a rank cannot compute with its part of them."""
        outer_ones = expert_lora.outer_wrappers(base)
        if spec is not None and spec.compile and sizes.tensor > 1 and outer_ones:
            raise RecipeError(
                f"model.compile={spec.compile}: torch cannot compile LoRA on parameters (experts, and layers beside "
                f"them that PEFT adapts as parameters) under tensor_parallel_size={sizes.tensor}; set compile to false"
            )
        if (spec is not None and spec.fused_lora) or not outer_ones:
            return
        expert = 1 if spec is None else self.expert_parallel_size
        for name, size in (("tensor", sizes.tensor), ("expert", expert)):
            if size > 1:
                raise RecipeError(
                    f"{name}_parallel_size={size} without model.fused_lora: PEFT adds LoRA to whole tensors "
                    "(target_parameters), of which a rank has a part; set model.fused_lora to true"
                )

    def _check_tensor(self, size: int, spec: TrainingSpec | None, base: PreTrainedModel) -> None:
        # The skeleton always has dense weights; the module knows whether quantized ones will be read.
        if (spec is not None and spec.base.is_quantized) or is_quantized(base):
            raise RecipeError(
                f"tensor_parallel_size={size} cannot shard the packed weights of a quantized base; leave "
                "quantization out, or use pipeline_parallel_size and data_parallel_size"
            )
        tensor_plan.check(base, size, self.tp_plan)
        if self.sequence_parallel and (beside := _weights_beside_layers(base) + _arguments(base, _OF_ALL_TOKENS)):
            raise RecipeError(
                "sequence_parallel=true splits the hidden states that go from layer to layer, and "
                f"{type(base).__name__} has more beside them ({', '.join(beside)}); set it to false"
            )

    def _check_zero_bubble(self, checkpointing: Checkpointing | None) -> None:
        if not torch_internals.HAS_ZERO_BUBBLE:
            raise RecipeError(
                f"schedule={self.schedule} needs torch 2.13 or newer, and this is {torch.__version__}, where "
                "its backward pass fails; take Interleaved1F1B"
            )
        if checkpointing == "selective":
            raise RecipeError(
                f"schedule={self.schedule} runs the backward pass of a layer twice, and what "
                "model.gradient_checkpointing=selective keeps is there once; set it to true, or take 1F1B"
            )

    def _check_experts(self, sizes: MeshSizes, base: PreTrainedModel) -> None:
        size = self.expert_parallel_size
        if sizes.tensor > 1:
            if size != sizes.tensor:
                raise RecipeError(
                    f"expert_parallel_size={size} with tensor_parallel_size={sizes.tensor}: experts are assigned to "
                    f"the tensor-parallel ranks; set expert_parallel_size to {sizes.tensor} or leave it out"
                )
        elif sizes.data * sizes.context % size:
            raise RecipeError(
                f"expert_parallel_size={size} must divide the {sizes.data * sizes.context} ranks of a stage "
                f"(data {sizes.data} x context {sizes.context})"
            )
        expert_parallel.check(base, size)

    def _check_stages(self, sizes: MeshSizes, base: PreTrainedModel) -> None:
        parts = getattr(decoder_of(base), "layers", None)
        if parts is None or not _plans_stages(base):
            raise RecipeError(
                f"pipeline_parallel_size={sizes.pipeline}: Hugging Face does not say how {type(base).__name__} "
                "is split into stages (pp_plan); use tensor_parallel_size and data_parallel_size"
            )
        if beside := _weights_beside_layers(base) + _arguments(base, _OF_LAYER_BEFORE):
            raise RecipeError(
                f"pipeline_parallel_size={sizes.pipeline}: {type(base).__name__} gives each layer more than the hidden "
                f"states of the one before ({', '.join(beside)}), which stages do not pass on; use "
                "tensor_parallel_size and data_parallel_size"
            )
        head = head_layer(base)
        stages = self.layers_of_stages(sizes, base)
        for number, of_stage in enumerate(stages):
            edges = [base.get_input_embeddings()] * (number == 0) + [head] * (number == len(stages) - 1)
            if not any(trains(part) for part in (*(parts[index] for index in of_stage), *edges)):
                raise RecipeError(
                    f"pipeline_parallel_size={sizes.pipeline}: nothing trains in stage {number} (layers "
                    f"{of_stage.start} to {of_stage.stop - 1}); train something in each, choose layers_per_stage so "
                    "that each has some, or use data_parallel_size and tensor_parallel_size"
                )

    def sizes(self, nodes: int, devices: int) -> MeshSizes:
        """Mesh sizes for the ranks of a run, with ``auto`` replaced by a number.

        Raises:
            RecipeError: the product of the sizes is not the number of ranks.
        """
        world = nodes * devices
        unknown = [name for name, size in self.requested._asdict().items() if size == "auto"]
        known = math.prod(size for size in self.requested if isinstance(size, int))
        if len(unknown) > 1:
            names = ", ".join(f"{name}_parallel_size" for name in unknown)
            raise RecipeError(f"trainer.strategy: {names} are auto; give all but one of them")
        if known < 1 or world % known or (not unknown and known != world):
            asked = " x ".join(f"{name} {size}" for name, size in self.requested._asdict().items())
            raise RecipeError(
                f"trainer.strategy: {asked} must make {world} ranks ({nodes} nodes x {devices} "
                f"devices); {self._how_to_make(world, known)}"
            )
        return MeshSizes(*(world // known if size == "auto" else size for size in self.requested))

    def _how_to_make(self, world: int, known: int) -> str:
        """Options to set so that the sizes, whose product is known without those that are auto, make the ranks."""
        sizes = {name: size for name, size in self.requested._asdict().items() if isinstance(size, int)}
        is_whole = len(sizes) == len(self.requested)
        others = math.prod(size for name, size in sizes.items() if name != "data")
        if is_whole and others > 0 and world % others == 0:
            return f"set data_parallel_size to auto or {world // others}"
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        names = " and ".join(f"{name}_parallel_size" for name, size in sizes.items() if size != 1)
        more = f", or start {known if is_whole else f'a multiple of {known}'} ranks" if known > 0 else ""
        return f"set {names} so that they do, each to one of {divisors}{more}"

    def micro_batches(self, sizes: MeshSizes, micro_batch_size: int | None) -> int:
        """Number of pipeline micro-batches that a packed batch is split into."""
        return self.num_microbatches or micro_batch_size or sizes.pipeline

    def layers_of_stages(self, sizes: MeshSizes, base: PreTrainedModel) -> list[range]:
        """Indices of each stage's decoder layers.

        Raises:
            RecipeError: there are fewer layers than stages, or ``layers_per_stage`` does not add up to the layers.
        """
        stages = sizes.pipeline * pipeline_parallel.stages_per_rank(self.schedule)
        layers = getattr(base, base.base_model_prefix).layers
        if self.layers_per_stage is not None:
            given = self.layers_per_stage
            if len(given) != stages or sum(given) != len(layers) or min(given) < 1:
                raise RecipeError(
                    f"trainer.strategy layers_per_stage={given} must be {stages} numbers of at least 1 (stages of "
                    f"{self.schedule} on {sizes.pipeline} ranks) that add up to the {len(layers)} layers"
                )
            return [range(end - count, end) for end, count in zip(accumulate(given), given, strict=True)]
        if len(layers) < stages:
            raise RecipeError(
                f"pipeline_parallel_size={sizes.pipeline} with schedule {self.schedule} makes {stages} stages, "
                f"but {type(base).__name__} has {len(layers)} layers; use at most "
                f"{len(layers) // pipeline_parallel.stages_per_rank(self.schedule)}"
            )
        # The last stage also computes the head; the embedding is a look-up, with negligible cost.
        head = sum(p.numel() for p in head_layer(base).parameters())
        costs = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
        costs[-1] += head
        return split_evenly(costs, stages)


def _check_mixers(sizes: MeshSizes, base: PreTrainedModel) -> None:
    if sizes.context > 1 and (others := token_mixers.other_than_attention(base)):
        raise RecipeError(
            f"context_parallel_size={sizes.context} gives each rank a part of each sample, and {type(base).__name__} "
            f"mixes tokens in other ways than attention ({', '.join(others)}), which would see that part alone; set "
            "it to 1 (the other sizes work)"
        )


def _plans_stages(base: PreTrainedModel) -> bool:
    return any(name.endswith(".layers") for name in base.pp_plan or ())


def _weights_beside_layers(base: PreTrainedModel) -> list[str]:
    """Parts of a decoder with weights that its plan for a pipeline does not name: their outputs go to each layer.

    Without a plan, those that its class makes before the layers, other than the embedding.
    """
    decoder = decoder_of(base)
    names = list(dict.fromkeys(name.partition(".")[0] for name, _ in decoder.named_parameters()))
    if _plans_stages(base):
        planned = {name.rpartition(".")[2] for name in base.pp_plan or ()}
        return sorted(set(names) - planned)
    before = names[: names.index("layers")] if "layers" in names else []
    return sorted(name for name in before if getattr(decoder, name) is not base.get_input_embeddings())


_OF_LAYER_BEFORE = frozenset({"prev_topk_indices"})
"""Arguments of a decoder layer that the layer before computes (transformers 5.24)."""
_OF_ALL_TOKENS = frozenset({"ple_input_ids"})
"""Arguments of a decoder layer that it adds to its hidden states, and that are those of all tokens."""


def _arguments(base: PreTrainedModel, names: frozenset[str]) -> list[str]:
    """Arguments of the decoder layers that are among ``names``."""
    layers = getattr(decoder_of(base), "layers", [])
    return sorted({name for layer in layers for name in names & signature(type(layer).forward).parameters.keys()})


def _check_context(size: int, module: nn.Module, base: PreTrainedModel) -> None:
    spec = spec_of(module)
    asked = (base.config, "auto") if spec is None else (spec.base.config, spec.base.attn_implementation)
    attention = pick_attention(*asked)
    if attention != PACKED or not isinstance(module, SplitsForward):
        raise RecipeError(
            f"context_parallel_size={size} needs lit_ft.CausalLM with its packed attention, but "
            f"{type(base).__name__} in {type(module).__name__} has {attention}; set it to 1"
        )
    if any(rotary_embedding.depends_on_length(part) for part in base.modules()):
        raise RecipeError(
            f"context_parallel_size={size}: the rotary frequencies of {type(base).__name__} depend on the length of a "
            "sample (longrope, dynamic), of which a rank has a part; set it to 1"
        )
    if spec is not None and spec.neftune_alpha is not None:
        raise RecipeError(
            f"context_parallel_size={size}: neftune_alpha={spec.neftune_alpha} draws noise for whole samples; "
            "leave it out, or set context_parallel_size to 1"
        )


def base_of(module: nn.Module) -> PreTrainedModel:
    """Hugging Face causal LM inside a module.

    Raises:
        RecipeError: the module contains none.
    """
    for candidate in module.modules():
        if isinstance(candidate, PreTrainedModel) and head_layer(candidate) is not None:
            return candidate
    raise RecipeError(
        f"ModelParallelStrategy needs a Hugging Face causal LM, and {type(module).__name__} holds none; use ddp or "
        "lit_ft.strategies.FSDPStrategy"
    )


def trains(module: nn.Module) -> bool:
    """Whether a weight of a module trains."""
    return any(p.requires_grad for p in module.parameters())
