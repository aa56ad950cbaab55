"""The loss: a sum over supervised tokens, computed without ever holding all logits.

Legend: n supervised tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

LOGITS_PER_CHUNK = 2**26
"""Logits that exist at a time: 441 tokens of a 151,936-token vocabulary, 256 MiB in fp32."""


class TokenLoss(NamedTuple):
    """What a row's supervised tokens come to."""

    loss_sum: Tensor
    """Scalar, fp32: cross-entropy summed over the tokens, in nats."""
    correct: Tensor
    """Scalar, int64: tokens whose highest logit is the target's."""
    per_token: Tensor
    """``(n,)``, fp32: what ``loss_sum`` is the sum of; without gradient."""


def token_cross_entropy(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    chunk_tokens: int,
    head_parameters: Sequence[Tensor] = (),
) -> TokenLoss:
    """Sum of the cross-entropy over supervised tokens, chunk by chunk.

    The gradient of each chunk is taken at once, in the forward pass, so that its logits are freed
    before the next chunk and the head is not computed a second time in the backward pass. (The idea
    is that of Liger-Kernel's fused linear cross-entropy, Hsu et al. 2024, arXiv:2410.10989.)

    Args:
        hidden: final hidden states of the predicting positions, ``(n, H)``.
        head: the model's own head, ``(m, H) -> (m, V)``, soft-capping and scaling included.
        targets: token ids, ``(n,)``, int64.
        chunk_tokens: supervised tokens whose logits exist at a time.
        head_parameters: the head's parameters that train; they get their gradients through the result.

    Raises:
        ValueError: ``hidden`` and ``targets`` disagree in length.
    """
    if len(hidden) != len(targets):
        raise ValueError(f"{len(hidden)} hidden states for {len(targets)} targets; one each is needed")
    if not torch.is_grad_enabled():
        head_parameters = ()
    return TokenLoss(*_ChunkedCrossEntropy.apply(hidden, head, targets, chunk_tokens, *head_parameters))


def tokens_per_chunk(vocabulary: int) -> int:
    """Supervised tokens whose logits fit in ``LOGITS_PER_CHUNK``."""
    return max(1, LOGITS_PER_CHUNK // vocabulary)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        targets: Tensor,
        chunk_tokens: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        differentiate = [hidden.requires_grad, *(tensor.requires_grad for tensor in parameters)]
        sums = [torch.zeros_like(t) for t, wanted in zip((hidden, *parameters), differentiate, strict=True) if wanted]
        per_token = hidden.new_zeros(len(hidden), dtype=torch.float32)
        correct = targets.new_zeros(())
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            with torch.set_grad_enabled(bool(sums)):
                part = hidden[chunk].detach().requires_grad_(hidden.requires_grad)
                logits = head(part)
                losses = cross_entropy(logits.float(), targets[chunk], reduction="none")
                loss = losses.sum()
            per_token[chunk] = losses.detach()
            correct += (logits.detach().argmax(-1) == targets[chunk]).sum()
            if sums:
                inputs = [t for t, wanted in zip((part, *parameters), differentiate, strict=True) if wanted]
                for i, grad in enumerate(torch.autograd.grad(loss, inputs)):
                    into = sums[i][chunk] if i == 0 and hidden.requires_grad else sums[i]
                    into += grad
        ctx.save_for_backward(*sums)
        ctx.differentiate = differentiate
        ctx.mark_non_differentiable(correct, per_token)
        return per_token.sum(), correct, per_token

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a head's gradient is as large as the head. A second backward raises (saved tensor changed).
        sums = iter(ctx.saved_tensors)
        hidden, *parameters = (next(sums).mul_(grad_loss) if wanted else None for wanted in ctx.differentiate)
        return hidden, None, None, None, *parameters


def loss_weight(*, window_tokens: int, accumulate: int, replicas: int) -> float:
    """Factor on a micro-batch's summed loss that makes the optimiser step's gradient token-exact.

    The step's loss is the sum over all micro-batches and ranks divided by ``window_tokens``, the
    supervised tokens of them all. Lightning divides by ``accumulate`` and the strategy averages
    gradients over ``replicas``: both are undone here.
    """
    return accumulate * replicas / max(window_tokens, 1)
