"""Running statistics of batch norms, which a forward pass changes before its loss is known."""

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lit_callbacks.internals import torch_internals


class RunningStatistics:
    """Copies of the running statistics of a module's norms, to put them back where a step is skipped.

    With a NaN in its input, a batch norm's running mean is NaN from then on, and so is each evaluation.
    """

    def __init__(self, module: nn.Module) -> None:
        """Copy them.

        Args:
            module: root module.
        """
        self._norms = [norm for norm in module.modules() if isinstance(norm, torch_internals.NormBase)]
        self._copies: list[Tensor] = []
        self.keep()

    def keep(self) -> None:
        """Copy the present statistics."""
        if len(self._copies) != len(present := self._present()):  # a lazy norm has its own since its first batch
            self._copies = [statistic.clone() for statistic in present]
        elif present:
            torch_internals.copy_all(self._copies, present)

    def restore(self) -> None:
        """Put the copied statistics back."""
        if len(self._copies) == len(present := self._present()) > 0:  # else a lazy norm has got its own in this step
            torch_internals.copy_all(present, self._copies)

    def _present(self) -> list[Tensor]:
        """Statistics of all norms, as tensors whose changes autograd does not see: a graph may still hold them."""
        buffers = (buffer for norm in self._norms for buffer in norm.buffers(recurse=False))
        return [buffer.data for buffer in buffers if not is_lazy(buffer)]
