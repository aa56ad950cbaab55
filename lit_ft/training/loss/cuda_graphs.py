"""Forward and backward pass of all decoder layers as CUDA graphs, one pair for each shape of a packed batch.

A small model on short rows waits for the launches of its kernels: a layer of LoRA has about 130 in a step. Recorded,
they are two launches for all layers. The first batch of a shape is computed as without, the second one is recorded, and
all later ones are replayed. Graphs share their memory, since the backward pass of one ends before the next begins.

A graph repeats what it recorded: shapes and numbers of the host are its own, tensors may change their values.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lit_ft.errors import RecipeError, first_line
from lit_ft.model.attention.packed_attention import PACKED
from lit_ft.model.attention.segments import Segments
from lit_ft.model.isolation.lengths import samples_of

Layers = Callable[[Tensor, Tensor, Segments], Tensor]
"""Hidden states ``(1, T, H)`` of token ids and positions ``(1, T)``."""

MANY_SHAPES = 64
"""Recorded shapes that are warned of."""


def check(cuda_graphs: bool, pad_rows_to: int | None, excluded: Mapping[str, object]) -> None:
    """Refuse batches of any length, and options that a graph cannot repeat.

    Args:
        cuda_graphs: whether graphs are asked for.
        pad_rows_to: number that the tokens of a packed batch are a multiple of; None pads none.
        excluded: options by name that do not go with graphs, where their values are set.

    Raises:
        RecipeError: two of the options do not go together.
    """
    if pad_rows_to is not None and pad_rows_to < 1:
        raise RecipeError(f"model.pad_rows_to={pad_rows_to} must be a number of tokens, e.g. 256; null pads nothing")
    if pad_rows_to is not None and not cuda_graphs:
        raise RecipeError(
            f"model.pad_rows_to={pad_rows_to} only costs time without CUDA graphs; set model.cuda_graphs to true, or "
            "leave it out"
        )
    if not cuda_graphs:
        return
    if pad_rows_to is None:
        raise RecipeError(
            "model.cuda_graphs records graphs for each number of tokens in a packed batch; set model.pad_rows_to, "
            "e.g. to 256, so that there are few"
        )
    for name, value in excluded.items():
        if value not in (None, False):
            raise RecipeError(
                f"model.cuda_graphs with model.{name}={value}, in which the host takes part for each batch; leave one "
                "of them out"
            )


def check_attention(implementation: str) -> None:
    """Refuse attention functions of transformers, which are called sample by sample or build masks on the host.

    Raises:
        RecipeError: attention is not the packed one.
    """
    if implementation != PACKED:
        raise RecipeError(
            f"model.cuda_graphs with attention by {implementation}: graphs are recorded of packed attention alone; set "
            "model.cuda_graphs to false, or leave model.attn_implementation at auto where the architecture allows it"
        )


def check_strategy(strategy: Strategy) -> None:
    """Refuse strategies that move weights in memory or split the layers.

    Raises:
        RecipeError: the strategy is neither a single device nor DDP.
    """
    if not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy:
        raise RecipeError(
            f"model.cuda_graphs with {type(strategy).__name__}: graphs are recorded for weights that keep their place "
            "in memory, on one device or under DDP; set model.cuda_graphs to false, or take trainer.strategy: ddp"
        )


class DecoderGraphs:
    """Computes training batches through recorded graphs on CUDA, and as they are elsewhere."""

    def __init__(self, layers: Layers, model: nn.Module) -> None:
        """Record nothing yet.

        Args:
            layers: computes hidden states, with a gradient for the model's parameters.
            model: model whose parameters that train get gradients.
        """
        self._layers, self._model = layers, model
        self._parameters: list[nn.Parameter] = []
        self._weights: list[tuple[int, bool]] = []
        """Place in memory of each parameter, and whether it trains."""
        self._trained: list[nn.Parameter] = []
        self._recorded: dict[tuple[int | None, ...], _Recorded | None] = {}
        self._pool: Any = None
        self._has_warned = False
        self.passes = 0
        """Recorded passes that were replayed, forward and backward ones."""

    def __call__(self, ids: Tensor, positions: Tensor, segments: Segments) -> Tensor:
        """Hidden states ``(1, T, H)``; with gradients where autograd is on.

        Raises:
            RecipeError: the layers do what a graph cannot repeat.
        """
        if not can_record(ids.device):
            if not self._has_warned:
                self._has_warned = True
                rank_zero_info(f"model.cuda_graphs: there is nothing to record on this device ({ids.device.type})")
            return self._layers(ids, positions, segments)
        self._parameters = self._parameters or [*self._model.parameters()]
        if (weights := [(p.data_ptr(), p.requires_grad) for p in self._parameters]) != self._weights:
            self._weights, self._recorded = weights, {}
            self._trained = [p for p in self._parameters if p.requires_grad]
        shape = ids.shape[1], None if segments.ends is None else len(segments.ends), segments.longest
        if shape not in self._recorded:
            self._recorded[shape] = None
            return self._layers(ids, positions, segments)  # compiles and loads what the recording needs
        recorded = self._recorded[shape]
        if recorded is None:
            recorded = self._recorded[shape] = self._record(ids, positions, segments)
        return _Replay.apply(self, recorded, (ids, positions, segments.ends), *self._trained)

    def _record(self, ids: Tensor, positions: Tensor, segments: Segments) -> "_Recorded":
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        recorded = _Recorded(self._layers, self._trained, (ids, positions, segments), self._pool)
        count = sum(one is not None for one in self._recorded.values()) + 1
        if count == 1:
            rank_zero_info("model.cuda_graphs: layers are recorded, for each shape of a batch that comes a second time")
        if count == MANY_SHAPES:
            rank_zero_warn(
                f"model.cuda_graphs: {count} shapes of packed batches are recorded, which costs time and memory; a "
                "larger model.pad_rows_to makes fewer"
            )
        return recorded


def can_record(device: torch.device) -> bool:
    """Whether a device has graphs that repeat what was queued on it."""
    return device.type == "cuda"


class _Recorded:
    """Graphs of one shape, and the tensors that they read and write."""

    def __init__(
        self, layers: Layers, trained: Sequence[nn.Parameter], batch: tuple[Tensor, Tensor, Segments], pool: Any
    ) -> None:
        ids, positions, (ends, longest) = batch
        self.inputs = ids.clone(), positions.clone(), None if ends is None else ends.clone()
        self._layers, self._trained, self._longest = layers, trained, longest
        device = ids.device.type
        # Autocast keeps weights that it has cast, in memory of the graph that came first.
        cast = nullcontext()
        if torch.is_autocast_enabled(device):
            cast = torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False)  # type: ignore[assignment]
        try:
            with cast, samples_of(None):
                self.hidden, self.forward = record(self._compute, pool)
                self.grad_hidden = torch.zeros_like(self.hidden)
                self._gradients, self.backward = record(self._compute_gradients, pool)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise RecipeError(
                "model.cuda_graphs: this model's layers do what a CUDA graph cannot repeat "
                f"({first_line(error)}); set model.cuda_graphs to false"
            ) from error

    def _compute(self) -> Tensor:
        ids, positions, ends = self.inputs
        self._differentiable = self._layers(ids, positions, Segments(ends, self._longest))
        return self._differentiable.detach()

    def _compute_gradients(self) -> dict[torch.dtype, Tensor]:
        found = torch.autograd.grad(self._differentiable, self._trained, self.grad_hidden, allow_unused=True)
        del self._differentiable
        self._shapes = [None if one is None else (one.dtype, one.shape) for one in found]
        of_dtype: dict[torch.dtype, list[Tensor]] = {}
        for one in filter(lambda gradient: gradient is not None, found):
            of_dtype.setdefault(one.dtype, []).append(one.reshape(-1))
        return {dtype: torch.cat(pieces) for dtype, pieces in of_dtype.items()}

    def gradients(self) -> list[Tensor | None]:
        """Gradients of the parameters that train, after a replay, in memory of their own."""
        pieces = {
            dtype: iter(flat.clone().split([shape.numel() for of, shape in filter(None, self._shapes) if of == dtype]))
            for dtype, flat in self._gradients.items()
        }
        return [None if one is None else next(pieces[one[0]]).view(one[1]) for one in self._shapes]


def record(compute: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    """Record what a function queues on CUDA; returns its result, and a function that computes it again in place.

    The result has no values before the first replay. Other threads may use CUDA meanwhile, as to pin batches does.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = compute()
    return result, graph.replay


class _Replay(torch.autograd.Function):
    """Hidden states of a batch from a recorded forward pass, and gradients from the recorded backward pass."""

    @staticmethod
    def forward(
        ctx: Any, graphs: DecoderGraphs, recorded: _Recorded, inputs: tuple[Tensor | None, ...], *_: Tensor
    ) -> Tensor:
        for own, given in zip(recorded.inputs, inputs, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
        recorded.forward()
        graphs.passes += 1
        ctx.graphs, ctx.recorded, ctx.number = graphs, recorded, graphs.passes
        return recorded.hidden.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.number != ctx.graphs.passes:
            raise RecipeError(
                "model.cuda_graphs: the memory of this batch's activations was taken by a later pass; compute the "
                "backward pass of a batch once, before the next batch, or set model.cuda_graphs to false"
            )
        ctx.recorded.grad_hidden.copy_(grad)
        ctx.recorded.backward()
        ctx.graphs.passes += 1
        return None, None, None, *ctx.recorded.gradients()
