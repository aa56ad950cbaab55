"""Where llama.cpp's tensors differ from Hugging Face's: names, the order of rows and columns, values of norms."""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import torch
from torch import Tensor
from transformers import PretrainedConfig

from lit_ft.errors import RecipeError
from lit_ft.gguf.architectures import Family
from lit_ft.model.architecture import Architecture

_DELTA_NET = ".linear_attn."
_RENAMED = {
    ".dt_bias": ".dt_proj.bias",
    ".layer_scalar": ".layer_scalar.weight",
    ".experts.gate_up_proj": ".experts.gate_up_proj.weight",
    ".experts.down_proj": ".experts.down_proj.weight",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
}
"""Endings of names that gguf's table lacks, with those that it has for the same tensors."""


def names_of(family: Family, config: PretrainedConfig) -> Callable[[str], str]:
    """Function from the name of a Hugging Face tensor to that in GGUF, which raises ``RecipeError`` for others."""
    names = gguf.get_tensor_name_map(family.arch, config.num_hidden_layers)

    def name_in_gguf(name: str) -> str:
        ending = next((ending for ending in _RENAMED if name.endswith(ending)), "")
        renamed = name.removesuffix(ending) + _RENAMED.get(ending, "")
        gguf_name = names.get_name(renamed, (".weight", ".bias", ".scale"))
        if gguf_name is None:
            raise RecipeError(f"the tensor {name} has no name in GGUF's {family.arch.name}; leave out --gguf")
        return gguf_name

    return name_in_gguf


def value_of(name: str, values: Tensor, family: Family) -> Tensor:
    """Values of a Hugging Face tensor as llama.cpp takes them, in Hugging Face's order.

    Args:
        name: name in Hugging Face's files.
        values: the tensor.
        family: family of the model.
    """
    if name.endswith(".A_log"):
        return -values.to(torch.float32).exp()
    if name.endswith(".conv1d.weight"):
        return values.squeeze(1)  # (channels, 1, kernel)
    if family.norms_from_one and name.endswith("norm.weight") and _DELTA_NET not in name:
        return values.to(torch.float32) + 1
    return values


@dataclass(frozen=True)
class Order:
    """Order of llama.cpp for the rows or columns of a weight."""

    dim: int
    """0 for rows, 1 for columns."""
    index: Tensor
    """Number of each row or column in Hugging Face's tensor, ``(rows or columns,)``."""

    def applied(self, values: Tensor) -> Tensor:
        """A tensor with its rows or columns in this order."""
        return values.index_select(self.dim, self.index)


def order_of(name: str, config: PretrainedConfig, family: Family) -> Order | None:
    """Order of llama.cpp for a tensor; None where it is that of Hugging Face.

    Args:
        name: name in Hugging Face's files.
        config: config of the model.
        family: family of the model.
    """
    layer = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if _DELTA_NET in name:
        return _order_in_delta_net(layer, config)
    if not family.pairs_neighbors or layer not in ("q_proj", "k_proj"):
        return None
    heads = config.num_attention_heads if layer == "q_proj" else config.num_key_value_heads
    rows = torch.arange(heads * Architecture.of(config).head_dim)
    # (heads, 2 halves, pairs) -> (heads, pairs, 2): element i of each half is next to its partner.
    return Order(0, rows.view(heads, 2, -1).swapaxes(1, 2).reshape(-1))


def _order_in_delta_net(layer: str, config: PretrainedConfig) -> Order | None:
    """Order for heads of values: where several share a key, llama.cpp has the first of each key before the second."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size = 1 if layer in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else config.linear_value_head_dim
    index = torch.arange(values * size).view(keys, values // keys, size).swapaxes(0, 1).reshape(-1)
    if layer == "norm":
        return None
    if layer in ("in_proj_qkv", "conv1d"):
        of_queries_and_keys = 2 * keys * config.linear_key_head_dim
        index = torch.cat([torch.arange(of_queries_and_keys), of_queries_and_keys + index])
    return Order(1 if layer == "out_proj" else 0, index)
