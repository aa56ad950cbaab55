"""FLOPs of training a transformer on a batch, from its weights and a Hugging Face style config.

Model FLOPs, as Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B) define them for MFU: the FLOPs that one
forward and one backward pass need. Recomputation by activation checkpointing or flash attention is not counted, nor is
padding, and causal attention counts all pairs, half of which are masked.

A weight of n elements costs 2n for each token that it is multiplied with in the forward pass, 2n for the gradient of
its input, and 2n for its own gradient if it is trainable: 6n in full fine-tuning, 4n if it is frozen after a trainable
weight, 2n if it is frozen before all of them. PEFT multiplies out its adapters of fused experts once per pass, for any
number of tokens; here they are counted per token.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from lit_callbacks.distributed.gather import full_numel, full_shape
from lit_callbacks.throughput.batch_counts import BatchCounts, Number
from lit_callbacks.throughput.transformer_shape import TransformerShape

Position = tuple[float, float, int]
"""Position in the order of computation: layer, stage within the layer, and 1 for an adapter's second factor."""

_LAYER = re.compile(r"\.(?:layers?|h|blocks?)\.(\d+)\.")
_STAGES = [
    re.compile(pattern)
    for pattern in (
        r"input_layernorm|\bln_1\b|\bln1\b",
        r"\bq_proj|\bk_proj|\bv_proj|qkv|\bc_attn|query|\bkey\b|\bvalue\b",
        r"\bo_proj|attn\.c_proj|out_proj",
        r"post_attention_layernorm|\bln_2\b|\bln2\b",
        r"\bgate\b|gate_proj|up_proj|gate_up_proj|\bc_fc\b|\bw1\b|\bw3\b",
        r"down_proj|mlp\.c_proj|\bw2\b",
    )
]
_ATTENTION_INPUTS = 1.0
_SECOND_FACTOR = re.compile(r"lora_B|vera_lambda_b")
_PROJECTIONS = {"q": r"\bq_proj|query", "k": r"\bk_proj|\bkey\b", "v": r"\bv_proj|\bvalue\b"}
_FUSED = re.compile(r"qkv|\bc_attn")
_ADDED = re.compile(r"pos|embed|token")
"""In names of parameters that are added to hidden states: learned positions, a class token."""


@runtime_checkable
class HasFeatures(Protocol):
    """A layer that knows its size, as ``nn.Linear`` does."""

    in_features: int
    out_features: int


@runtime_checkable
class HasOutputHead(Protocol):
    """A model that tells which of its modules is the output head, as those of transformers do."""

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None without one."""


@dataclass(frozen=True)
class TransformerFlops:
    """FLOPs of a batch as a weighted sum of its counts."""

    per_token: float
    """FLOPs of the layers' weights for each token that is computed."""
    per_head_position: float
    """FLOPs of the output head's weights for each position for which it is computed."""
    per_pair: Mapping[int | None, float] = field(default_factory=dict)
    """FLOPs of attention for each query-key pair of a sample, by the width of the sliding window (None without one)."""

    def __call__(self, counts: BatchCounts) -> Number | None:
        """FLOPs of one forward and backward pass over a batch; None where its tokens are unknown."""
        if counts.computed_tokens is None or counts.head_positions is None or counts.lengths is None:
            return None
        attention = sum(cost * counts.pairs(window) for window, cost in self.per_pair.items())
        of_weights = self.per_token * counts.computed_tokens
        return of_weights + self.per_head_position * counts.head_positions + attention

    @classmethod
    def of(cls, model: nn.Module) -> "TransformerFlops | None":
        """The formula for a model; None if there is not exactly one ``TransformerShape`` within it.

        Args:
            model: module with a Hugging Face style transformer, with or without a PEFT method, possibly on the meta
                device.
        """
        if (shape := TransformerShape.of(model)) is None:
            return None
        positions = {name: _position(name) for name, p in model.named_parameters() if p.requires_grad}
        first: Position = min(positions.values(), default=(float("inf"), 0.0, 0))
        heads = _head_weights(model)
        per_token = per_head = 0.0
        for name, weight, numel in _matrices(model):
            passes = 1 + (first < _position(name)) + weight.requires_grad
            cost = 2.0 * passes * numel * (shape.share_of_experts if re.search(r"\bexperts\b", name) else 1.0)
            if id(weight) in heads:
                per_head += cost
            else:
                per_token += cost
        return cls(per_token, per_head, _attention(shape, first, positions))


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Names of the weights that tokens are multiplied with, the weights, and their numbers of elements; no lookups."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, weight in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}"
            is_lookup = "lora_embedding" in full_name or ".original_module." in full_name
            if id(weight) in seen or is_lookup or _ADDED.search(name) or len(full_shape(weight)) < 2:
                continue
            seen.add(id(weight))
            # The shape of a packed quantized weight is not its size; the layer has the size.
            features = _features(module) if name == "weight" else None
            yield full_name, weight, math.prod(features) if features else full_numel(weight)


def _features(module: nn.Module) -> tuple[int, int] | None:
    """Numbers of input and output features that a layer gives, as ``nn.Linear`` does; None without them."""
    if not isinstance(module, HasFeatures):
        return None
    sizes = module.in_features, module.out_features
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _head_weights(model: nn.Module) -> set[int]:
    heads = [module.get_output_embeddings() for module in model.modules() if isinstance(module, HasOutputHead)]
    return {id(parameter) for head in heads if head is not None for parameter in head.parameters()}


def _position(name: str) -> Position:
    """Position of a weight in the order of computation: embeddings, then layers stage by stage, then the rest."""
    name = f".{name}"
    if (layer := _LAYER.search(name)) is None:
        is_embedding = re.search(r"embed|\bwte\b|\bwpe\b", name) is not None
        return (-1.0 if is_embedding else float("inf"), 0.0, 0)
    within = name[layer.end() :]
    # An attention gate (``\bgate\b`` matches routers) and unknown names count as late: their input has gradients.
    stage = next((float(i) for i, pattern in enumerate(_STAGES) if pattern.search(within)), float("inf"))
    return float(layer.group(1)), stage, int(_SECOND_FACTOR.search(within) is not None)


def _attention(shape: TransformerShape, first: Position, trainable: Mapping[str, Position]) -> dict[int | None, float]:
    """FLOPs of scores and weighted values: 2 per pair and element of a head, and twice that in the backward pass."""
    trained: dict[float, set[str]] = defaultdict(set)
    for name, (layer, stage, _) in trainable.items():
        if stage == _ATTENTION_INPUTS:
            trained[layer] |= {
                part for part, names in _PROJECTIONS.items() if _FUSED.search(name) or re.search(names, name)
            }
    total: dict[int | None, float] = defaultdict(float)
    for layer, (kind, width) in enumerate(zip(shape.layer_kinds, shape.attention_widths, strict=True)):
        if kind is not None and "attention" in kind and "linear" in kind:
            continue  # linear attention: its cost is in its weights
        below = first < (layer, _ATTENTION_INPUTS, 0)
        q, k, v = (below or part in trained[layer] for part in "qkv")
        products = 2 + v + (q or k) + q + k
        window = None if kind == "full_attention" else shape.sliding_window
        total[window] += 2 * products * width
    return dict(total)
