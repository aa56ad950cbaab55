"""Activation checkpointing: selection of the activations that are kept; the others are recomputed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

Checkpointing = bool | Literal["selective"]

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def options(checkpointing: Checkpointing) -> dict[str, object]:
    """Keyword arguments that transformers' ``gradient_checkpointing_enable`` passes to ``torch.utils.checkpoint``.

    ``selective`` keeps the results of matrix products and attention, which are expensive, and recomputes norms, rotary
    embeddings and activation functions, which are cheap and as large (Korthikanti et al. 2022, arXiv:2205.05198,
    section 5).
    """
    if checkpointing != "selective":
        return {"use_reentrant": False}
    return {"use_reentrant": False, "context_fn": _keep_products()}


def _keep_products() -> Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]:
    operations = [getattr(torch.ops.aten, name).default for name in (*_PRODUCTS, *_ATTENTION)]
    return partial(create_selective_checkpoint_contexts, operations)
