"""Loss of tokens by a teacher's probabilities, chunk by chunk beside the student's logits."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lit_ft.training.distillation.divergences import Divergence
from lit_ft.training.distillation.teacher import Teacher
from lit_ft.training.loss.token_cross_entropy import FromLogits, LossOfLogits

LOGITS_AT_ONCE = 2**20
"""Number of logits whose fp32 copies, 4 MiB each, fit in a CPU core's cache, or nearly."""
LOGITS_AT_ONCE_ON_CUDA = 2**26
"""The same on CUDA, where the copies are in memory: 256 MiB each."""


class TeacherLoss(LossOfLogits):
    """Divergence from the teacher at each target, mixed with its cross-entropy.

    Args:
        teacher: model whose probabilities are learned; its weights are read.
        hidden: its final hidden states at the n targets, ``(n, H)``.
        divergence: between both models' probabilities.
        ratio: part of the divergence in the loss, from 0 to 1; the rest is that of the cross-entropy.
    """

    def __init__(self, teacher: Teacher, hidden: Tensor, divergence: Divergence, ratio: float) -> None:
        self.teacher, self.hidden, self.divergence, self.ratio = teacher, hidden, divergence, ratio
        self.total = torch.zeros((), dtype=torch.float32, device=hidden.device)  # the default dtype may be bf16
        """Divergence summed over the tokens that were computed, fp32."""

    def of_chunk(self, chunk: slice) -> FromLogits:
        """Loss of the tokens of a chunk, from their logits."""
        return partial(self._from_logits, self.hidden[chunk])

    def _from_logits(
        self, hidden: Tensor, logits: Tensor, targets: Tensor, has_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        of_teacher = self.teacher.logits(hidden)
        losses, right = logits.new_empty(len(logits), dtype=torch.float32), (logits.argmax(-1) == targets).sum()
        at_once = LOGITS_AT_ONCE_ON_CUDA if logits.is_cuda else LOGITS_AT_ONCE
        rows = max(1, at_once // logits.shape[1])
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            own = logits[part].float().requires_grad_(has_gradient)
            with torch.set_grad_enabled(has_gradient):
                loss = self._mixed(own, of_teacher[part], targets[part])
                if has_gradient:
                    (logits[part],) = torch.autograd.grad(loss.sum(), own)
            losses[part] = loss.detach()
        return losses, right, logits if has_gradient else None

    def _mixed(self, logits: Tensor, of_teacher: Tensor, targets: Tensor) -> Tensor:
        temperature = self.divergence.temperature
        student, teacher = logits[:, : of_teacher.shape[1]], of_teacher.float()
        if temperature != 1:  # each quotient is another copy in fp32
            student, teacher = student / temperature, teacher / temperature
        divergence = self.divergence.of(student.log_softmax(-1), teacher.log_softmax(-1)) * temperature**2
        self.total += divergence.detach().sum()
        if self.ratio == 1:
            return divergence
        known = cross_entropy(logits, targets, reduction="none")
        return torch.lerp(known, divergence, self.ratio)
