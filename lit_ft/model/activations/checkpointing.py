"""Activation checkpointing: selection of the activations that are kept; the others are recomputed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Literal

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from lit_ft.internals.torch import OpOverload, operators_of_attention
from lit_ft.model.activations import kept_results
from lit_ft.model.isolation import lengths

Checkpointing = bool | Literal["selective"]

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def options(checkpointing: Checkpointing, in_graph: bool = False) -> dict[str, object]:
    """Keyword arguments that transformers passes to ``torch.utils.checkpoint``.

    ``selective`` keeps the results of matrix products and attention, which are expensive, and recomputes norms, rotary
    embeddings and activation functions, which are cheap and as large (Korthikanti et al. 2022, arXiv:2205.05198,
    section 5).

    Args:
        checkpointing: what is recomputed.
        in_graph: whether both passes are in a graph of torch.compile, which takes no other contexts than torch's.
    """
    kept = _kept() if checkpointing == "selective" else []
    if not in_graph:
        return {"use_reentrant": False, "context_fn": partial(_contexts, kept)}
    selection = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if kept else {}
    return {"use_reentrant": False, **selection}


def _kept() -> list[OpOverload]:
    from lit_ft.model.attention import segments  # noqa: F401  # registers the operator of compiled layers on a CPU

    products = [getattr(torch.ops.aten, name).default for name in _PRODUCTS]
    return [*products, *operators_of_attention(), torch.ops.lit_ft.attend_to_segments.default]


def _contexts(kept: list[OpOverload]) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Contexts of a layer's first pass and of the second one, in which the packed batch is that of the first."""
    first, again = kept_results.contexts(kept) if kept else (nullcontext(), nullcontext())
    return first, _Again(lengths.current(), lengths.shared(), again)


class _Again(ExitStack):
    """Context of a second pass; a pipeline that splits its backward pass in two enters it twice."""

    def __init__(
        self, samples: Sequence[int], shared: lengths.SharedTokens | None, kept: AbstractContextManager[object]
    ) -> None:
        super().__init__()
        self._samples, self._shared, self._kept = samples, shared, kept

    def __enter__(self) -> "_Again":
        self.enter_context(lengths.samples_of(self._samples, self._shared))
        self.enter_context(self._kept)
        return super().__enter__()
