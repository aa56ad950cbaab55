"""Wrappers that strategies put around a module's forward pass, its answers and a decoder, all in one place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lit_callbacks.protocols import AnswersPrompts
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers.utils import ModelOutput

from lit_ft.packed_batch import PackedBatch, TokenLoss

Forward = Callable[[PackedBatch], TokenLoss]
Answer = Callable[[Sequence[str], int], Sequence[str]]


def wrap_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
    """Replace a module's forward pass over a packed batch by ``wrap`` of it."""
    module.forward = wrap(module.forward)


def wrap_answer(module: nn.Module, wrap: Callable[[Answer], Answer]) -> None:
    """Replace a module's ``answer`` by ``wrap`` of it; callbacks call it outside of any step."""
    if isinstance(module, AnswersPrompts):
        module.answer = wrap(module.answer)  # type: ignore[method-assign, assignment]


def gather_in_answer(module: nn.Module) -> None:
    """Let FSDP gather the module's own weights for ``answer``, as it does for the forward pass."""
    if isinstance(module, AnswersPrompts):
        register_fsdp_forward_method(module, "answer")


def map_hidden_states(decoder: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to the final hidden states that a decoder returns."""
    forward = decoder.forward

    def mapped(*args: object, **kwargs: object) -> ModelOutput:
        output = forward(*args, **kwargs)
        output.last_hidden_state = function(output.last_hidden_state)
        return output

    decoder.forward = mapped


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Context in which a call of the module runs another function."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
