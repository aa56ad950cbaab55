"""Detection of persistent buffers that training changes, because checkpoints hold only parameters."""

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.distributed.gather import persistent_buffers
from torch import Tensor, nn


class BufferWatch:
    """Copies of a model's floating-point persistent buffers before training, to compare with those after it."""

    def __init__(self, model: nn.Module) -> None:
        buffers = {name: buffer.detach() for name, buffer in persistent_buffers(model) if _can_train(buffer)}
        self._built = {name: buffer.to("cpu", copy=True) for name, buffer in buffers.items()}
        self._has_warned = False

    def warn_of_changes(self, model: nn.Module) -> None:
        """Warn once of buffers that training has changed and a checkpoint does not hold.

        The model is the same, or this rank's part of it.
        """
        here = dict(persistent_buffers(model))
        changed = [
            name
            for name, built in self._built.items()
            if name in here and not torch.equal(here[name].detach().to(built), built)
        ]
        if changed and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"training changes the buffers {', '.join(changed[:3])} ({len(changed)} in all), which checkpoints do "
                "not hold: a resumed run and `export` start from the base's; the folders of the run's end have them"
            )


def _can_train(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and not buffer.is_meta
