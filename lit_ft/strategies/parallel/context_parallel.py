"""Context parallelism: each rank computes some tokens of a packed batch, and gathers the keys and values of all.

A packed batch is split into twice as many chunks as ranks; a rank has one from the front and its mirror image from the
back, so that causal attention is the same work for each (Llama 3: Grattafiori et al. 2024, arXiv:2407.21783, section
3.3.2). All operators but attention compute each token independently, and need no change.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from lit_ft.model.packed_attention import own_ranges
from lit_ft.packed_batch import PackedBatch, TokenLoss


class ContextParallel:
    """Distribution of a packed batch's tokens over the ranks of a mesh dimension.

    Args:
        mesh: mesh of one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.size, self.rank = mesh, mesh.size(), mesh.get_local_rank()

    def prepare(self, layers: Sequence[nn.Module]) -> None:
        """Store the mesh in the attention layers, where ``lit_ft.model.packed_attention.packed_attention`` reads it.

        Args:
            layers: decoder layers of this rank.
        """
        for layer in layers:
            for part in layer.modules():
                part.context_mesh = self.mesh  # type: ignore[assignment]

    def local_tokens(self, row: PackedBatch) -> PackedBatch:
        """Select this rank's tokens of a packed batch; ``segment_lengths`` stay those of all tokens.

        Args:
            row: packed batch of T tokens, where T is a multiple of twice the number of ranks.
        """
        tokens = row["input_ids"].shape[1]
        ranges = own_ranges(tokens, self.size, self.rank)
        places = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
        place_here = torch.full((tokens,), -1)
        place_here[places] = torch.arange(len(places))
        device = row["input_ids"].device
        places, at = places.to(device), place_here.to(device)[row["predict_at"]]
        return {
            **row,
            "input_ids": row["input_ids"][:, places],
            "position_ids": row["position_ids"][:, places],
            "predict_at": at[at >= 0],
            "targets": row["targets"][at >= 0],
            "is_own": at >= 0,
        }

    def full_loss(self, result: TokenLoss, row: PackedBatch) -> TokenLoss:
        """Loss of the full packed batch, from that of each rank's tokens; a collective.

        Args:
            result: loss of this rank's tokens.
            row: this rank's tokens, as ``local_tokens`` returned them.
        """
        is_own = row["is_own"]
        found = result.per_token.new_zeros(1 + len(is_own))  # fp32, whatever precision makes the default
        found[0] = result.correct
        found[1:][is_own] = result.per_token
        dist.all_reduce(found, group=self.mesh.get_group())
        return TokenLoss(_Sum.apply(result.loss_sum, found[1:].sum(), self.size), found[0].long(), found[1:])


class _SumContext(FunctionCtx):
    ranks: int


class _Sum(torch.autograd.Function):
    """Sum over ranks; the gradient is multiplied by their number, as gradients are averaged over ranks later."""

    @staticmethod
    def forward(ctx: _SumContext, own: Tensor, total: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return total.clone()

    @staticmethod
    def backward(ctx: _SumContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.ranks, None, None
