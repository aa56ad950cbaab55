"""Cross-entropy loss summed over supervised tokens, computed in chunks so that not all logits are in memory at once.

Legend: n supervised tokens, H hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from lit_callbacks.distributed.gather import full_tensor
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from lit_ft.packed_batch import TokenLoss
from lit_ft.training.loss.token_weights import TokenWeights

LOGITS_PER_CHUNK = 2**26
"""Largest number of logits in memory at once: 441 tokens of a 151,936-token vocabulary, 256 MiB in fp32."""
LOGITS_PER_CHUNK_ON_CUDA = 2**28
"""The same on CUDA, where products of so few tokens with the head leave most of a GPU idle: 512 MiB in bf16."""

_LOGITS_IN_CACHE = 2**20
"""Number of logits whose fp32 copy, 4 MiB, fits in a CPU core's cache."""

LossOf = Callable[[Tensor, bool], tuple[Tensor, Tensor | None]]
"""From the cross-entropy of each token, ``(n,)``: a loss, scalar, and if asked for, its derivatives, ``(n,)``."""

FromLogits = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor | None]]
"""Loss of each token, number of right predictions and, if it is asked for, the gradient of logits ``(m, V)``."""


class LossOfLogits(ABC):
    """Loss of each token that is not a function of its cross-entropy alone."""

    @abstractmethod
    def of_chunk(self, chunk: slice) -> FromLogits:
        """What computes the tokens of a chunk; the gradient may overwrite the logits."""


_is_repeatable = ContextVar("_is_repeatable", default=False)


@contextmanager
def repeatable_backward() -> Iterator[None]:
    """Context in which losses have a backward pass that can run twice, for inputs and for weights separately.

    Zero-bubble pipeline schedules need this; for a trainable head it costs the memory of one more gradient.
    """
    token = _is_repeatable.set(True)
    try:
        yield
    finally:
        _is_repeatable.reset(token)


def token_cross_entropy(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    chunk_tokens: int,
    head_parameters: Sequence[Tensor] = (),
    is_compiled: bool = False,
    loss_of: LossOf | LossOfLogits | TokenWeights | Tensor | None = None,
    from_logits: FromLogits | None = None,
) -> TokenLoss:
    """Sum of the cross-entropy over supervised tokens, weighted or not, or another loss of them, chunk by chunk.

    The gradient of each chunk is computed at once, in the forward pass, so that its logits are freed
    before the next chunk and the head is not computed a second time in the backward pass. (The idea
    is that of Liger-Kernel's fused linear cross-entropy, Hsu et al. 2024, arXiv:2410.10989.)

    The gradient of another loss of the tokens' cross-entropy is that of the sum, with each token's part times the
    loss's derivative by it. Derivatives are known once all tokens are computed: for a head that trains, which adds up
    the gradients of its tokens, chunks are computed a second time.

    Args:
        hidden: final hidden states of the predicting positions, ``(n, H)``.
        head: the model's own head, ``(m, H) -> (m, V)``, soft-capping and scaling included; its output is overwritten
            with gradients.
        targets: token ids, ``(n,)``, int64.
        chunk_tokens: number of supervised tokens whose logits are in memory at once.
        head_parameters: parameters of the head; trainable ones get their gradients through the result.
        is_compiled: whether torch.compile fuses what follows the head on CUDA.
        loss_of: loss in place of the sum, or weights of the tokens in it, also as a tensor ``(n,)``, fp32; or what
            takes the place of the cross-entropy, of which the loss is the sum.
        from_logits: takes the place of the cross-entropy in all else.

    Raises:
        ValueError: ``hidden`` and ``targets`` disagree in length.
    """
    if len(hidden) != len(targets):
        raise ValueError(f"{len(hidden)} hidden states for {len(targets)} targets; one each is needed")
    trains = [p for p in head_parameters if p.requires_grad and torch.is_grad_enabled()]
    computes: FromLogits | LossOfLogits = _compiled() if is_compiled and hidden.is_cuda else _from_logits
    if isinstance(loss_of, LossOfLogits):
        computes, loss_of, head = loss_of, None, partial(_whole_logits, head)
    computes = from_logits or computes
    return TokenLoss(*_ChunkedCrossEntropy.apply(hidden, head, targets, chunk_tokens, computes, loss_of, *trains))


def tokens_per_chunk(vocabulary: int, device: str) -> int:
    """Number of supervised tokens whose logits are in memory at once, on a type of device."""
    return max(1, (LOGITS_PER_CHUNK_ON_CUDA if device == "cuda" else LOGITS_PER_CHUNK) // vocabulary)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        targets: Tensor,
        chunk_tokens: int,
        from_logits: FromLogits | LossOfLogits,
        loss_of: LossOf | TokenWeights | Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunks = _Chunks(hidden, head, targets, chunk_tokens, from_logits)
        if loss_of is None or isinstance(loss_of, TokenWeights | Tensor):
            per_token, correct, of_hidden, of_parameters = chunks.compute(parameters, loss_of)
            loss = (per_token if loss_of is None else _factors(loss_of, per_token) * per_token).sum()
        elif parameters:
            per_token, correct, _, _ = chunks.compute(None)
            loss, weights = loss_of(per_token, True)
            _, _, of_hidden, of_parameters = chunks.compute(parameters, weights)
        else:
            per_token, correct, of_hidden, of_parameters = chunks.compute(())
            loss, weights = loss_of(per_token, of_hidden is not None)
            if of_hidden is not None and weights is not None:
                of_hidden *= weights[:, None]
        ctx.save_for_backward(of_hidden, *of_parameters)
        ctx.is_repeatable = _is_repeatable.get()
        ctx.mark_non_differentiable(correct, per_token)
        return loss, correct, per_token

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a head's gradient is as large as the head. A second backward raises (saved tensor changed).
        scale = torch.mul if ctx.is_repeatable else Tensor.mul_
        hidden, *parameters = (g if g is None else scale(g, grad_loss) for g in ctx.saved_tensors)
        return hidden, None, None, None, None, None, *parameters


class _Chunks(NamedTuple):
    """Supervised tokens, whose logits are computed chunk by chunk; the fields are those of ``token_cross_entropy``."""

    hidden: Tensor
    head: Callable[[Tensor], Tensor]
    targets: Tensor
    chunk_tokens: int
    from_logits: FromLogits | LossOfLogits

    def compute(
        self, parameters: Sequence[Tensor] | None, weights: Tensor | TokenWeights | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Loss of each token, number of right predictions, and gradients of the weighted sum of losses.

        Args:
            parameters: parameters of the head that train; None computes no gradient at all.
            weights: factor on the loss of each token, ``(n,)``, or what gives them; None is 1 for all.

        Returns:
            Losses ``(n,)``, the number, the gradient of the hidden states if they need one, and of the parameters.
        """
        needs_hidden, trains = parameters is not None and self.hidden.requires_grad, parameters or ()
        of_hidden = torch.zeros_like(self.hidden) if needs_hidden else None
        of_parameters: list[Tensor | None] = [None for _ in trains]
        per_token = self.hidden.new_zeros(len(self.hidden), dtype=torch.float32)
        correct = self.targets.new_zeros(())
        for start in range(0, len(self.hidden), self.chunk_tokens):
            chunk = slice(start, start + self.chunk_tokens)
            part = self.hidden[chunk].detach().requires_grad_(needs_hidden)
            inputs = [part, *trains] if needs_hidden else [*trains]
            weight = weights[chunk] if isinstance(weights, Tensor) else weights
            of_tokens = self.from_logits
            of_tokens = of_tokens.of_chunk(chunk) if isinstance(of_tokens, LossOfLogits) else of_tokens
            losses, right, grads = _chunk_loss(self.head, part, self.targets[chunk], inputs, of_tokens, weight)
            per_token[chunk] = losses
            correct += right
            if of_hidden is not None:
                of_hidden[chunk] = grads[0] if grads[0] is not None else 0
            for i, grad in enumerate(grads[len(grads) - len(trains) :]):
                total = of_parameters[i]
                of_parameters[i] = total.add_(grad) if total is not None and grad is not None else grad
        complete = [torch.zeros_like(p) if g is None else g for p, g in zip(trains, of_parameters, strict=True)]
        return per_token, correct, of_hidden, complete


def _chunk_loss(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    inputs: Sequence[Tensor],
    from_logits: FromLogits,
    weights: Tensor | TokenWeights | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Loss of each token, number of correct predictions, and gradients of the weighted sum; logits are then freed.

    The gradient of an input that the head does not use is None.
    """
    with torch.set_grad_enabled(bool(inputs)):
        logits = head(hidden)
    if isinstance(logits, DTensor):
        return _split_loss(logits, targets, inputs, weights)
    # The edge is taken first, and detached logits are overwritten: autograd forbids in-place changes of a view that a
    # custom function returned.
    made_by = get_gradient_edge(logits) if inputs else None
    losses, right, of_logits = from_logits(logits.detach(), targets, bool(inputs))
    if of_logits is not None and weights is not None:
        of_logits *= _factors(weights, losses)[:, None]
    grads = () if made_by is None else torch.autograd.grad(made_by, inputs, of_logits, allow_unused=True)
    return losses, right, grads


def _from_logits(logits: Tensor, targets: Tensor, has_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """``FromLogits`` whose gradient overwrites the logits in memory.

    A CPU computes a few tokens at a time, which fit in its cache: a fifth of the time of all tokens at once.
    """
    losses, right = logits.new_empty(len(logits), dtype=torch.float32), targets.new_zeros(())
    rows = max(1, _LOGITS_IN_CACHE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        target = targets[part, None]
        log_p = logits[part].log_softmax(-1, dtype=torch.float32)
        losses[part] = -log_p.gather(1, target)[:, 0]
        right += (log_p.max(-1).indices == target[:, 0]).sum()
        if has_gradient:
            logits[part] = log_p.exp_().scatter_add_(1, target, torch.full_like(log_p[:, :1], -1.0))
    return losses, right, logits if has_gradient else None


def negative_score(scores: Tensor, targets: Tensor, has_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """``FromLogits`` of a head that scores texts, ``(m, 1)``: the better a text, the lower its loss."""
    gradient = torch.full_like(scores, -1.0) if has_gradient else None
    return -scores[:, 0].float(), targets.new_zeros(()), gradient


def _in_one_expression(logits: Tensor, targets: Tensor, has_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """``FromLogits`` for torch.compile: the kernels that it makes on CUDA write no logits in fp32."""
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    losses = -log_p.gather(1, targets[:, None])[:, 0]
    right = (logits.argmax(-1) == targets).sum()
    if not has_gradient:
        return losses, right, None
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return losses, right, (log_p.exp() - is_target.float()).to(logits.dtype)


@cache
def _compiled() -> FromLogits:
    return torch.compile(_in_one_expression, dynamic=True, fullgraph=True)


def _whole_logits(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Logits over the whole vocabulary, where tensor parallelism has sharded it."""
    logits = head(hidden)
    if isinstance(logits, DTensor):
        return logits.full_tensor(grad_placements=[Replicate()] * logits.device_mesh.ndim)
    return logits


def _factors(weights: Tensor | TokenWeights, losses: Tensor) -> Tensor:
    return weights if isinstance(weights, Tensor) else weights.of(losses)


def _split_loss(
    logits: DTensor, targets: Tensor, inputs: Sequence[Tensor], weights: Tensor | TokenWeights | None
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """``_chunk_loss`` of logits that tensor parallelism has sharded along the vocabulary."""
    with torch.set_grad_enabled(bool(inputs)), loss_parallel():
        losses = cross_entropy(logits.float(), targets, reduction="none")
        weighted, whole = losses, full_tensor(losses).detach()
        if weights is not None:
            factors, mesh = _factors(weights, whole), logits.device_mesh
            weighted = losses * DTensor.from_local(factors, mesh, [Replicate()] * mesh.ndim, run_check=False)
        grads = torch.autograd.grad(weighted.sum(), inputs, allow_unused=True) if inputs else ()
    return whole, (_most_likely(logits) == targets).sum(), grads


def _most_likely(logits: DTensor) -> Tensor:
    mesh, vocabulary = logits.device_mesh, logits.shape[-1]
    best, position = logits.to_local().detach().max(-1, keepdim=True)
    position = position + mesh.get_local_rank() * -(-vocabulary // mesh.size())
    best, position = (DTensor.from_local(t, mesh, [Shard(1)], run_check=False).full_tensor() for t in (best, position))
    return position.gather(1, best.argmax(1, keepdim=True))[:, 0]
