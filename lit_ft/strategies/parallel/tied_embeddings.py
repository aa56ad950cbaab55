"""A weight that is embedding and head at once, where a pipeline has the two on different stages."""

from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from lit_ft.gradient_norm import local


class TiedEdges:
    """Keeps two copies of a tied weight the same, and counts them once.

    Args:
        module: the LightningModule, with all of its layers.
        base: the Hugging Face model in it.
    """

    def __init__(self, module: nn.Module, base: PreTrainedModel) -> None:
        edges: Any = {"embedding": base.get_input_embeddings(), "head": base.get_output_embeddings()}
        self._in_base = {which: _name_of_weight(base, edge) for which, edge in edges.items()}
        self.names = {which: _name_of_weight(module, edge) for which, edge in edges.items()}
        self.copies: dict[str, nn.Parameter] = {}
        """By ``embedding`` and ``head``: those of this rank, where they train and are two."""
        self.group: Any = None
        """Ranks with the same part of either; None where one rank has both."""

    def connect(self, module: nn.Module, ranks_per_stage: int, last_rank: int) -> None:
        """Find the copies, once the model is split; a collective.

        Args:
            module: the LightningModule.
            ranks_per_stage: ranks that hold parts of the same stage.
            last_rank: one of those of the last stage.
        """
        own = dict(module.named_parameters(remove_duplicate=False))
        here = {which: own[name] for which, name in self.names.items() if name in own}
        last_stage = last_rank - last_rank % ranks_per_stage
        # Every rank makes every group.
        pairs = [dist.new_group([first, last_stage + first]) for first in range(ranks_per_stage)] if last_stage else []
        are_two = bool(last_stage) or len({id(p) for p in here.values()}) == 2
        if are_two and any(p.requires_grad for p in here.values()):
            self.copies, self.group = here, pairs[dist.get_rank() % ranks_per_stage] if pairs else None

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients."""
        gradients = [local(p.grad) for p in self.copies.values() if p.grad is not None]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients:
            dist.all_reduce(gradients[0], group=self.group)

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is the second of two."""
        return self.copies.get("head") is parameter

    def saved_name(self, name: str) -> str:
        """The name under which an optimizer's state is saved: the embedding's for both."""
        return self.names["embedding"] if self.copies and name == self.names["head"] else name

    @property
    def copy_in_base(self) -> str:
        """The second's name in the Hugging Face model, which is saved without it."""
        return self._in_base["head"]


def _name_of_weight(model: nn.Module, edge: Any) -> str:
    path = next(name for name, module in model.named_modules() if module is edge)
    return f"{path}.{next(name for name, weight in edge.named_parameters() if weight is edge.weight)}"
