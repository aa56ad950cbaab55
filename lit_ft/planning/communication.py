"""Bytes that a rank sends in an optimizer step: ``communication_formulas`` applied to the distributed model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from lit_ft.gradient_norm import local
from lit_ft.model.architecture import Architecture
from lit_ft.model.loading import decoder_layers
from lit_ft.planning import communication_formulas
from lit_ft.planning.layout import Layout
from lit_ft.process import datamodule_of
from lit_ft.protocols import BoundsTokens
from lit_ft.strategies.parallel.mesh import trains
from lit_ft.strategies.parallel.tensor_plan import is_block

ASSUMED_TOKENS = 1024
"""Number of tokens of a packed batch, if the data module does not define it."""


@dataclass(frozen=True)
class Step:
    """Amount of data in an optimizer step of one data-parallel rank."""

    batches: int
    """Number of packed batches: the trainer's micro-batches, which a pipeline splits further."""
    tokens: int
    """Largest number of tokens in a packed batch."""
    targets: int
    """Largest number of supervised tokens in a packed batch."""
    is_known: bool = True
    """Whether the data module defines the number of tokens; assumed otherwise."""


def step_of(trainer: Trainer) -> Step:
    """Amount of data in an optimizer step, assumed where the data module does not define it."""
    data = datamodule_of(trainer)
    tokens = data.token_budget if isinstance(data, BoundsTokens) else None
    at_most = tokens or ASSUMED_TOKENS
    return Step(trainer.accumulate_grad_batches, at_most, at_most, tokens is not None)


@dataclass(frozen=True)
class _Piece:
    """Consecutive layers on a rank: those of a stage, or all."""

    layers: Sequence[nn.Module]
    is_first: bool
    is_last: bool
    index: int = 0
    trains_before: bool = False
    """Whether there are trainable parameters before its first layer; every stage of a pipeline has some."""

    def blocks(self) -> list[tuple[bool, bool]]:
        """For each block: whether its input needs a gradient, and whether its output gets one."""
        needs, flows = [], self.trains_before
        for layer in self.layers:
            blocks = [child for child in layer.children() if is_block(child)]
            flows = flows or any(trains(child) for child in layer.children() if child not in blocks)
            for block in blocks:
                before, flows = flows, flows or trains(block)
                needs.append((before, flows))
        return needs

    def back(self) -> list[nn.Module]:
        """Layers that take part in the backward pass."""
        first = next((i for i, layer in enumerate(self.layers) if self.trains_before or trains(layer)), None)
        return [] if first is None else list(self.layers[first:])


def _pieces(layout: Layout) -> list[_Piece]:
    base = layout.base
    is_embedding_trained = trains(base.get_input_embeddings())
    if not layout.stages:
        return [_Piece(decoder_layers(base), True, True, trains_before=is_embedding_trained)]
    layers = getattr(base, base.base_model_prefix).layers
    return [
        _Piece(
            [layers[index] for index in stage.layers],
            stage.is_first,
            stage.is_last,
            stage.index,
            trains_before=is_embedding_trained if stage.is_first else True,
        )
        for stage in layout.stages
    ]


class Communication:
    """Bytes that this rank sends in an optimizer step.

    Args:
        layout: layout of the distributed model.
        parameters: parameters of the LightningModule on this rank.
        step: amount of data in an optimizer step.
    """

    def __init__(self, layout: Layout, parameters: Sequence[nn.Parameter], step: Step) -> None:
        base = layout.base
        self.layout, self.parameters, self.base, self.step = layout, parameters, base, step
        self.sizes, self.pieces, self.config = layout.sizes, _pieces(layout), base.config.get_text_config()
        self.policy = layout.precision
        self.itemsize = (self.policy.param_dtype or base.dtype).itemsize
        # Tokens of the full step on this rank: context parallelism distributes those of a packed batch over ranks.
        self.tokens = step.batches * step.tokens // self.sizes.context
        self.stream = self.tokens * self.config.hidden_size * self.itemsize
        self.recomputed = [len(p.back()) if base.is_gradient_checkpointing else 0 for p in self.pieces]

    def by_dimension(self) -> dict[str, float]:
        """Bytes sent along each dimension of the mesh with more than one rank."""
        sizes, sends = self.sizes, {}
        if sizes.pipeline > 1:
            sends["pipeline"] = self._along_pipeline(sizes.pipeline)
        if sizes.data * sizes.context > 1:  # weights are sharded over context-parallel ranks too
            sends["data"] = self._over_data()
        if sizes.context > 1:
            sends["context"] = self._along_context(sizes.context)
        if sizes.tensor > 1:
            sends["tensor"] = self._along_tensor(sizes.tensor)
        elif self.layout.expert_parallel_size > 1:
            sends["experts"] = self._along_experts()
        return sends

    def _along_tensor(self, ranks: int) -> float:
        """Bytes for blocks, embedding and head of each token, and for gradients once per step."""
        whole = self.layout.sequence_parallel
        total = communication_formulas.reduced(self._gradient_parts(), ranks)
        for piece, recomputed in zip(self.pieces, self.recomputed, strict=True):
            blocks = piece.blocks()
            into, out = (sum(column) for column in zip(*blocks, strict=True))
            total += communication_formulas.block_bytes(self.stream, ranks, len(blocks), into, out, recomputed, whole)
            if piece.is_first:
                total += communication_formulas.reduced(self.stream, ranks)
            if whole:  # sharded after the embedding, which sends bytes only backward, and gathered before the head
                ends = piece.is_last + (piece.is_first and piece.trains_before)
                total += ends * communication_formulas.gathered(self.stream, ranks)
            if piece.is_last:
                total += self._of_head(ranks)
        return total

    def _of_head(self, ranks: int) -> float:
        hidden, vocabulary = self.config.hidden_size * self.itemsize, self.config.vocab_size
        targets = self.step.batches * self.step.targets // self.sizes.context
        return communication_formulas.head_bytes(
            targets, hidden, ranks, vocabulary, self.itemsize, self.layout.loss_parallel
        )

    def _gradient_parts(self) -> int:
        """Bytes of gradients of which each tensor-parallel rank computes a partial sum."""
        children = [child for layer in decoder_layers(self.base) for child in layer.children()]
        in_blocks = {id(p) for child in children if is_block(child) for p in child.parameters()}
        parts = [p for p in self.parameters if p.requires_grad and not _is_tensor_sharded(p)]
        parts = [p for p in parts if self.layout.sequence_parallel or id(p) in in_blocks]
        # They are summed as full tensors, not as shards of a data-parallel rank: `fully_shard` scatters them later.
        return sum(sharded(p)[1] * (self.policy.reduce_dtype or p.dtype).itemsize for p in parts)

    def _along_context(self, ranks: int) -> float:
        """Bytes for keys and values of all ranks' tokens, for their gradients, and for the loss of each token."""
        keys_values = self.tokens * ranks * key_value_width(self.base.config) // self.sizes.tensor * self.itemsize
        total = communication_formulas.context_bytes(keys_values, ranks, *self._layers(), sum(self.recomputed))
        loss = any(piece.is_last for piece in self.pieces) * self.step.batches * (self.step.targets + 1) * 4
        return total + communication_formulas.reduced(loss, ranks)

    def _along_pipeline(self, ranks: int) -> float:
        """Bytes for hidden states, their gradients, the loss of each token, and a tied weight's gradient once."""
        here, last = {piece.index for piece in self.pieces}, ranks * len(self.pieces) - 1
        neighbors = [stage for k in here for stage in (k - 1, k + 1) if 0 <= stage <= last and stage not in here]
        # Without FSDP's precision policy, hidden states are sent in the base model's dtype.
        dtype = self.policy.param_dtype if self.sizes.data * self.sizes.context > 1 else None
        boundary = self.stream / self.itemsize * (dtype or self.base.dtype).itemsize
        boundary /= self.sizes.tensor if self.layout.sequence_parallel else 1
        tied = bytes_of(self.layout.tied_copies)
        return (
            len(neighbors) * boundary
            + self.step.batches * (self.step.targets + 2) * 4
            + communication_formulas.reduced(tied, 2)
        )

    def _along_experts(self) -> float:
        """Bytes for hidden states of tokens to the ranks of their experts, and for the outputs back."""
        width, per_token = self.config.hidden_size * self.itemsize, Architecture.of(self.base.config).experts_per_token
        ranks = self.layout.expert_parallel_size
        forward = communication_formulas.expert_bytes(self.tokens, per_token, width, ranks)
        return forward * (sum(self._layers()) + sum(self.recomputed))

    def _layers(self) -> tuple[int, int]:
        """Number of layers on this rank, and of those that take part in the backward pass."""
        return sum(len(piece.layers) for piece in self.pieces), sum(len(piece.back()) for piece in self.pieces)

    def _over_data(self) -> float:
        """Bytes for weights, per packed batch (with a pipeline once per step), and for gradients once per step."""
        is_piped = bool(self.layout.stages)
        freed = self.layout.reshard_after_forward and not is_piped
        back = [layer for piece in self.pieces for layer in piece.back()] if freed else []
        twice = {id(p) for layer in back for p in layer.parameters()}
        total = 0.0
        for parameter in self.parameters:
            ranks, elements, has_own_mesh = sharded(parameter)
            weights = elements * (self.policy.param_dtype or parameter.dtype).itemsize
            times = (1 if is_piped else self.step.batches) * (1 + (id(parameter) in twice and not has_own_mesh))
            gradient = elements * (self.policy.reduce_dtype or parameter.dtype).itemsize * parameter.requires_grad
            total += communication_formulas.gathered(weights * times + gradient, ranks)
        return total


def key_value_width(config: PretrainedConfig) -> int:
    """Elements of a token's keys and values in a layer, as its attention computes them.

    Latent attention (DeepSeek-V3) computes those of all heads, of two sizes, of its latent vector.
    """
    values = config.get_text_config().to_dict()
    if values.get("kv_lora_rank"):
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return int(values["num_attention_heads"] * sum(values[size] for size in sizes))
    model = Architecture.of(config)
    return 2 * model.kv_heads * model.head_dim


_REPLICAS = {"data_parallel", "context_parallel", "shard", "copies"}
"""Mesh dimensions over which weights are sharded and gathered; over the others, ranks compute with their shard."""


def sharded(parameter: nn.Parameter) -> tuple[int, int, bool]:
    """Number of ranks that a weight is gathered from, elements that they hold together, and whether it has a mesh of
    its own, as experts do."""
    if not isinstance(parameter, DTensor):
        return 1, parameter.numel(), False
    mesh, ranks, elements = parameter.device_mesh, 1, parameter.numel()
    names = mesh.mesh_dim_names or ()
    for name, size, placed in zip(names, mesh.shape, parameter.placements, strict=True):
        if name in _REPLICAS:
            ranks *= size
        elif not placed.is_replicate():
            elements //= size
    return ranks, elements, "experts" in names


def _is_tensor_sharded(parameter: nn.Parameter) -> bool:
    """Whether a parameter is sharded over tensor-parallel ranks."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor_parallel" in names and not parameter.placements[names.index("tensor_parallel")].is_replicate()


def bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of parameters on this rank."""
    return sum(local(p).numel() * p.element_size() for p in parameters)
