"""Megatron's forward pass in plain torch, on the weights of a checkpoint as its ranks hold them.

It is written by the code of Megatron-Core 0.16.1 (``GPTModel``, ``SelfAttention``, ``MLP``, ``MoELayer``), not by the
tables of this package, so that an error in a table shows as other logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_ft.megatron.shape import ModelShape

Weights = Callable[[str, int | None], list[Tensor]]
"""Gives the ranks' parts of a weight by its name in the table, and the number of an expert."""


def logits(ids: Tensor, shape: ModelShape, cos: Tensor, sin: Tensor, layers: list[Weights], model: Weights) -> Tensor:
    """Logits of a model.

    Args:
        ids: token ids, ``(tokens,)``.
        shape: sizes of the model.
        cos: cosines of the rotary embedding, ``(tokens, head_dim)``.
        sin: its sines.
        layers: weights of each layer.
        model: weights outside of layers.
    """
    embeddings = torch.cat(model("embedding.word_embeddings.weight", None))
    hidden = embeddings[ids]
    for weights in layers:
        normed = _norm(hidden, weights("input_layernorm.weight", None)[0], shape)
        hidden = hidden + _attention(normed, weights, shape, cos, sin)
        normed = _norm(hidden, weights("pre_mlp_layernorm.weight", None)[0], shape)
        hidden = hidden + (_experts(normed, weights, shape) if shape.experts else _mlp(normed, weights, "mlp", None))
    hidden = _norm(hidden, model("decoder.final_layernorm.weight", None)[0], shape)
    return hidden @ (embeddings if shape.is_tied else torch.cat(model("output_layer.weight", None))).T


def _norm(hidden: Tensor, weight: Tensor, shape: ModelShape) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, shape.norm_epsilon)


def _attention(hidden: Tensor, weights: Weights, shape: ModelShape, cos: Tensor, sin: Tensor) -> Tensor:
    """Sum over ranks of their heads' attention; ``linear_qkv`` has, by group, its queries, the key and the value."""
    family, size = shape.family, shape.head_dim
    qkv = weights("self_attention.linear_qkv.weight", None)
    projection = weights("self_attention.linear_proj.weight", None)
    biases = weights("self_attention.linear_qkv.bias", None) if family.qkv_bias else [None] * len(qkv)
    output = torch.zeros_like(hidden)
    for weight, bias, out in zip(qkv, biases, projection, strict=True):
        mixed = F.linear(hidden, weight, bias)
        mixed = mixed.view(len(hidden), -1, (shape.heads // shape.groups + 2) * size)
        query, key, value = mixed.split([shape.heads // shape.groups * size, size, size], dim=2)
        query = query.reshape(len(hidden), -1, size)
        if family.qk_norm:
            query = _norm(query, weights("self_attention.q_layernorm.weight", None)[0], shape)
            key = _norm(key, weights("self_attention.k_layernorm.weight", None)[0], shape)
        query, key, value = (
            heads.transpose(0, 1) for heads in (_rotate(query, cos, sin), _rotate(key, cos, sin), value)
        )
        context = F.scaled_dot_product_attention(query, key, value, _mask(len(hidden), shape), enable_gqa=True)
        output = output + context.transpose(0, 1).flatten(1) @ out.T
    return output


def _mask(tokens: int, shape: ModelShape) -> Tensor:
    """Whether a token (row) attends to another (column)."""
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return causal if shape.window is None else causal.triu(1 - shape.window)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def _mlp(hidden: Tensor, weights: Weights, prefix: str, expert: int | None) -> Tensor:
    """Sum over ranks: ``linear_fc1`` has the rank's gate above its up projection."""
    output = torch.zeros_like(hidden)
    columns, rows = weights(f"{prefix}.linear_fc1.weight", expert), weights(f"{prefix}.linear_fc2.weight", expert)
    for fc1, fc2 in zip(columns, rows, strict=True):
        gate, up = (hidden @ fc1.T).chunk(2, dim=-1)
        output = output + (F.silu(gate) * up) @ fc2.T
    return output


def _experts(hidden: Tensor, weights: Weights, shape: ModelShape) -> Tensor:
    scores = hidden @ weights("mlp.router.weight", None)[0].T
    if shape.normalizes_experts:
        top, chosen = scores.topk(shape.experts_per_token)
        probabilities = top.softmax(-1)
    else:
        probabilities, chosen = scores.softmax(-1).topk(shape.experts_per_token)
    output = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        result = _mlp(hidden[tokens], weights, "mlp.experts.{expert}", expert)
        output[tokens] += probabilities[tokens, places, None] * result
    return output
