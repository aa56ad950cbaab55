"""Context parallelism: each rank computes some tokens of a packed batch, and gathers the keys and values of all.

A packed batch is split into twice as many chunks as ranks; a rank has one from the front and its mirror image from the
back, so that causal attention is the same work for each (Llama 3: Grattafiori et al. 2024, arXiv:2407.21783, section
3.3.2). All operators but attention compute each token independently, and need no change.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from lit_callbacks.distributed.host_copy import queued_copy
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from lit_ft.model.attention.packed_attention import local_ranges
from lit_ft.packed_batch import PackedBatch, TokenLoss, with_factors


class ContextParallel:
    """Distribution of a packed batch's tokens over the ranks of a mesh of one dimension."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.size, self.rank = mesh, mesh.size(), mesh.get_local_rank()

    def prepare(self, layers: Sequence[nn.Module]) -> None:
        """Store the mesh in the attention layers, where packed attention reads it (``AttendsToAllRanks``)."""
        for layer in layers:
            for part in layer.modules():
                part.context_mesh = self.mesh  # type: ignore[assignment]

    def local_tokens(self, batch: PackedBatch) -> PackedBatch:
        """Select this rank's tokens of a packed batch; ``segment_lengths`` stay those of all tokens.

        Their number is a multiple of twice the number of ranks.
        """
        tokens = batch["input_ids"].shape[1]
        ranges = local_ranges(tokens, self.size, self.rank)
        indices = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
        index_here = torch.full((tokens,), -1)
        index_here[indices] = torch.arange(len(indices))
        device = batch["input_ids"].device
        indices, at = queued_copy(indices, device), queued_copy(index_here, device)[batch["predict_at"]]
        is_here = at >= 0
        here = is_here.nonzero()[:, 0]  # once: on CUDA the host waits for it, as for each mask
        local: PackedBatch = {
            **batch,
            "input_ids": batch["input_ids"][:, indices],
            "position_ids": batch["position_ids"][:, indices],
            "predict_at": at[here],
            "targets": batch["targets"][here],
            "is_local": is_here,
            "token_group": self.mesh.get_group(),
        }
        return with_factors(local, batch, here)

    def full_loss(self, result: TokenLoss, batch: PackedBatch) -> TokenLoss:
        """Loss of the full packed batch, from that of this rank's tokens (``local_tokens``); a collective."""
        is_local = batch["is_local"]
        summed = result.per_token.new_zeros(2 + len(is_local))  # fp32, whatever precision makes the default
        summed[0], summed[1] = result.correct, result.loss_sum.detach()
        summed[2:].masked_scatter_(is_local, result.per_token)
        dist.all_reduce(summed, group=self.mesh.get_group())
        # The loss of pairs is that of all tokens already: it is no sum over tokens.
        total = result.loss_sum.detach() if "pairs" in batch else summed[1]
        return TokenLoss(_Sum.apply(result.loss_sum, total, self.size), summed[0].long(), summed[2:])


class _SumContext(FunctionCtx):
    ranks: int


class _Sum(torch.autograd.Function):
    """Sum over ranks; the gradient is multiplied by their number, as gradients are averaged over ranks later."""

    @staticmethod
    def forward(ctx: _SumContext, summand: Tensor, total: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return total.clone()

    @staticmethod
    def backward(ctx: _SumContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.ranks, None, None
