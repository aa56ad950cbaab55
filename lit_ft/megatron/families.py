"""Tables of weights: which Hugging Face tensors one Megatron weight consists of, for each family of models.

The tables are data and are read in both directions. Megatron's names are those of its "local" layer specification, with
the number of an expert as ``{expert}``; ``names`` translates them to the names in files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Join = Literal["one", "query key value", "stacked"]
"""How Hugging Face tensors form one Megatron weight: unchanged, by groups of attention heads, or one below another."""


class Part(NamedTuple):
    """One Hugging Face tensor of a weight."""

    name: str
    """Name within the layer, or in the model; ``{expert}`` is the number of the expert."""
    sizes: tuple[str, ...]
    """Its shape, in names of ``ModelShape.sizes``."""


@dataclass(frozen=True)
class Weight:
    """One weight of Megatron: a row of the table."""

    megatron: str
    """Name in Megatron's model: within the layer, or in the model."""
    parts: tuple[Part, ...]
    """Hugging Face tensors that it consists of."""
    join: Join = "one"
    split: Literal[0, 1] | None = None
    """Dimension that tensor parallelism divides, of each part; None if every rank has all of it."""
    is_padded: bool = False
    """Whether rows are added up to a multiple (vocabulary)."""

    @property
    def of_experts(self) -> bool:
        """Whether each expert has this weight."""
        return "{expert}" in self.megatron


class Key(NamedTuple):
    """A weight of a model: a row of the table, in a layer, of an expert."""

    weight: Weight
    layer: int | None = None
    """Number of the layer in the model, from 0; None outside of layers."""
    expert: int | None = None
    """Number of the expert in the layer, from 0."""

    @property
    def megatron(self) -> str:
        """Name in Megatron's model, with the layer's number in the whole model."""
        name = self.weight.megatron.format(expert=self.expert)
        return name if self.layer is None else f"decoder.layers.{self.layer}.{name}"

    def hugging_face(self, part: Part) -> str:
        """Name of a part in Hugging Face's files."""
        name = part.name.format(expert=self.expert)
        return name if self.layer is None else f"model.layers.{self.layer}.{name}"


def _one(megatron: str, hugging_face: str, *sizes: str, split: Literal[0, 1] | None = None) -> Weight:
    return Weight(megatron, (Part(hugging_face, sizes),), split=split)


def _query_key_value(kind: str, *width: str) -> Weight:
    parts = tuple(
        Part(f"self_attn.{letter}_proj.{kind}", (rows, *width))
        for letter, rows in (("q", "queries"), ("k", "keys"), ("v", "keys"))
    )
    return Weight(f"self_attention.linear_qkv.{kind}", parts, "query key value", 0)


def _gated(megatron: str, gate: str, up: str, down: str, width: str) -> tuple[Weight, ...]:
    """Gate and up projection as one weight, and the down projection."""
    columns = (Part(gate, (width, "hidden")), Part(up, (width, "hidden")))
    return (
        Weight(f"{megatron}.linear_fc1.weight", columns, "stacked", 0),
        _one(f"{megatron}.linear_fc2.weight", down, "hidden", width, split=1),
    )


def _experts(router: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    return (
        _one("mlp.router.weight", router, "experts", "hidden"),
        *_gated("mlp.experts.{expert}", gate, up, down, "expert_ffn"),
    )


_LAYER = (
    _one("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    _query_key_value("weight", "hidden"),
    _one("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden", "queries", split=1),
    _one("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
)
_QK_NORM = (
    _one("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    _one("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)
_DENSE = _gated("mlp", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "ffn")
_QKV_BIAS = (_query_key_value("bias"),)

EMBEDDING = Weight(
    "embedding.word_embeddings.weight",
    (Part("model.embed_tokens.weight", ("vocabulary", "hidden")),),
    split=0,
    is_padded=True,
)
"""Word embeddings."""
FINAL_NORM = _one("decoder.final_layernorm.weight", "model.norm.weight", "hidden")
"""Norm after the last layer."""
HEAD = Weight("output_layer.weight", (Part("lm_head.weight", ("vocabulary", "hidden")),), split=0, is_padded=True)
"""Output head, of models whose head is not the embedding."""


@dataclass(frozen=True)
class Family:
    """Layers of one Hugging Face ``model_type``."""

    layer: tuple[Weight, ...]
    """Weights of a layer."""
    qkv_bias: bool = False
    qk_norm: bool = False
    has_experts: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(_LAYER + _DENSE),
    "mistral": Family(_LAYER + _DENSE),
    "qwen2": Family(_LAYER + _QKV_BIAS + _DENSE, qkv_bias=True),
    "qwen3": Family(_LAYER + _QK_NORM + _DENSE, qk_norm=True),
    "mixtral": Family(
        _LAYER
        + _experts(
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
            "block_sparse_moe.experts.{expert}.w2.weight",
        ),
        has_experts=True,
    ),
    "qwen3_moe": Family(
        _LAYER
        + _QK_NORM
        + _experts(
            "mlp.gate.weight",
            "mlp.experts.{expert}.gate_proj.weight",
            "mlp.experts.{expert}.up_proj.weight",
            "mlp.experts.{expert}.down_proj.weight",
        ),
        qk_norm=True,
        has_experts=True,
    ),
}
"""Families with a table, by ``model_type`` of config.json."""


def layer_keys(family: Family, layer: int, experts: range) -> Iterator[Key]:
    """Weights of one layer, with those of some of its experts.

    Args:
        family: family of the model.
        layer: number of the layer in the model.
        experts: numbers of the experts.
    """
    for weight in family.layer:
        if weight.of_experts:
            for expert in experts:
                yield Key(weight, layer, expert)
        else:
            yield Key(weight, layer)


def model_keys(family: Family, layers: int, experts: int, is_tied: bool) -> Iterator[Key]:
    """All weights of a model, in the order of its layers.

    Args:
        family: family of the model.
        layers: number of layers.
        experts: number of experts in a layer; 0 in dense models.
        is_tied: whether the head is the embedding.
    """
    yield Key(EMBEDDING)
    for layer in range(layers):
        yield from layer_keys(family, layer, range(experts))
    yield Key(FINAL_NORM)
    if not is_tied:
        yield Key(HEAD)
