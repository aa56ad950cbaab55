"""Tied embeddings: one weight that is both embedding and head, with a copy on the first and last pipeline stage."""

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from lit_ft.gradient_norm import local
from lit_ft.model.architecture import head_layer


class TiedEmbeddings:
    """Two copies of a tied weight, kept equal, and counted and saved once."""

    def __init__(self, module: nn.Module, base: PreTrainedModel) -> None:
        edges = {"embedding": base.get_input_embeddings(), "head": head_layer(base)}
        self.copy_in_base = _name_of_weight(base, edges["head"])
        """Name of the second copy in the Hugging Face model; it is not saved."""
        self.names = {which: _name_of_weight(module, edge) for which, edge in edges.items()}
        self.copies: dict[str, nn.Parameter] = {}
        """This rank's copies, by ``embedding`` and ``head``; empty unless they are trainable and there are two."""
        self.group: dist.ProcessGroup | None = None
        """Process group of the two ranks that hold the same part of the weight; None if one rank has both copies."""

    def connect(self, module: nn.Module, ranks_per_stage: int, last_rank: int) -> None:
        """Find the copies, after the model is distributed; a collective.

        Args:
            module: LightningModule.
            ranks_per_stage: number of ranks that hold parts of the same stage.
            last_rank: global rank of any rank of the last stage.
        """
        own = dict(module.named_parameters(remove_duplicate=False))
        here = {which: own[name] for which, name in self.names.items() if name in own}
        last_stage = last_rank - last_rank % ranks_per_stage
        # torch requires that every rank creates every group.
        pairs = [dist.new_group([first, last_stage + first]) for first in range(ranks_per_stage)] if last_stage else []
        are_two = bool(last_stage) or len({id(p) for p in here.values()}) == 2
        if are_two and any(p.requires_grad for p in here.values()):
            self.copies, self.group = here, pairs[dist.get_rank() % ranks_per_stage] if pairs else None

    def sum_gradients(self) -> None:
        """Replace the gradients of both copies by their sum."""
        gradients = [local(p.grad) for p in self.copies.values() if p.grad is not None]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients:
            dist.all_reduce(gradients[0], group=self.group)

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is the second copy, the head's."""
        return self.copies.get("head") is parameter

    def saved_name(self, name: str) -> str:
        """Name under which a parameter's optimizer state is saved: the embedding's for both copies."""
        return self.names["embedding"] if self.copies and name == self.names["head"] else name


def _name_of_weight(model: nn.Module, edge: nn.Module) -> str:
    path = next(name for name, module in model.named_modules() if module is edge)
    return f"{path}.{next(name for name, weight in edge.named_parameters() if weight is edge.weight)}"
