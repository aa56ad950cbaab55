"""Decoder layers compiled by torch.compile, each as one graph where its architecture allows it."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_ft.errors import RecipeError
from lit_ft.internals.torch import compile_modes, graph_breaks, prepare_to_compile
from lit_ft.internals.transformers import set_checkpointing
from lit_ft.model.activations.checkpointing import Checkpointing
from lit_ft.model.activations.checkpointing import options as checkpoint_options

VARIANTS = 64
"""Graphs that torch may make of one layer's code, e.g. for the first layer, in validation, for kinds of attention."""


def check(compiled: bool | str) -> None:
    """Refuse unknown backends and modes of torch.compile, and modes that record CUDA graphs layer by layer.

    Args:
        compiled: true, or the name of a mode of inductor or of another backend.

    Raises:
        RecipeError: the name is unknown or such a mode's.
    """
    if isinstance(compiled, str) and compiled not in (names := [*_modes(), *_backends()]):
        if compiled in compile_modes():
            raise RecipeError(
                f"model.compile={compiled} records CUDA graphs layer by layer, which takes longer than it saves; set "
                "model.cuda_graphs to true, which records all layers at once, and model.compile to true"
            )
        raise RecipeError(f"model.compile={compiled!r} is no mode and no backend of torch.compile; use true or {names}")


def _modes() -> list[str]:
    return [name for name, options in compile_modes().items() if not options.get("triton.cudagraphs")]


def uses_inductor(compiled: bool | str) -> bool:
    """Whether ``model.compile`` names inductor, by true, by one of its modes or by its name."""
    return compiled is True or compiled == "inductor" or compiled in compile_modes()


def _backends() -> list[str]:
    """Backends of torch.compile on this machine: all but those for debugging, and ``eager``, which fuses nothing."""
    return ["eager", "aot_eager", *torch.compiler.list_backends()]


def compile_layers(layers: Iterable[nn.Module], compiled: bool | str, checkpointing: Checkpointing = False) -> None:
    """Compile decoder layers for packed batches of any length; changed in place.

    A layer whose code cannot be one graph becomes several when it is first called, with activation checkpointing none,
    and a notice gives the reason.
    """
    prepare_to_compile(VARIANTS)
    options: dict[str, Any] = {"dynamic": True}
    if isinstance(compiled, str):
        options["mode" if compiled in compile_modes() else "backend"] = compiled
    reported: set[str] = set()
    for layer in layers:
        if checkpointing:
            set_checkpointing(layer, checkpoint_options(checkpointing, in_graph=True))
        # Without hooks, which run before and after the graph: those of FSDP gather weights there.
        layer.forward = _OneGraph(layer, options, checkpointing, reported)


def is_compiled(layer: nn.Module) -> bool:
    """Whether a layer is compiled."""
    return isinstance(layer.forward, _OneGraph)


class _OneGraph:
    """Compiled forward pass of a layer: one graph, or what is left from the first call on that cannot be one.

    All layers of a model share ``reported``, the notices that were printed.
    """

    def __init__(
        self, layer: nn.Module, options: dict[str, Any], checkpointing: Checkpointing, reported: set[str]
    ) -> None:
        self._layer, self._plain, self._options = layer, layer.forward, options
        self._checkpointing, self._reported = checkpointing, reported
        self._compiled = torch.compile(self._plain, fullgraph=True, **options)
        self._is_whole = True

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return self._compiled(*args, **kwargs)
        except graph_breaks() as reason:  # found while the code is read, before any of it is computed
            if not self._is_whole:
                raise
            self._report(str(reason).strip().splitlines()[0].rstrip("."))
        self._is_whole = False
        if self._checkpointing:  # torch compiles nothing of a checkpoint that is not whole
            set_checkpointing(self._layer, checkpoint_options(self._checkpointing))
            self._compiled = self._plain
        else:
            self._compiled = torch.compile(self._plain, **self._options)
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        """Forward pass of a copy of the layer, not compiled: the compiled one computes with this layer's weights."""
        return copy.deepcopy(self._plain, memo)

    def _report(self, reason: str) -> None:
        outcome = "is several graphs, not one, which is slower"
        if self._checkpointing:
            outcome = "is not compiled, as it is not one graph, which model.gradient_checkpointing needs"
        notice = f"model.compile: {type(self._layer).__name__} {outcome} ({reason})"
        if notice not in self._reported:
            self._reported.add(notice)
            rank_zero_info(notice)
