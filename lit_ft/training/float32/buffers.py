"""Buffers that stay in float32 whatever the precision."""

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Fp32BuffersModule(LightningModule):
    """LightningModule whose model keeps its float32 buffers when Lightning casts the module.

    Precision bf16-true casts every buffer; rotary frequencies in bf16 give tokens wrong positions.
    """

    model: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        self._fp32_buffers: dict[str, Tensor] = {}

    def keep_fp32_buffers(self) -> None:
        """Keep the float32 buffers that the model has now."""
        assert self.model is not None, "the model is built"
        self._fp32_buffers = {n: b.clone() for n, b in self.model.named_buffers() if b.dtype == torch.float32}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Fp32BuffersModule":
        super()._apply(fn, recurse)
        for name, buffer in [] if self.model is None else self.model.named_buffers():
            if name in self._fp32_buffers and buffer.dtype != torch.float32:
                buffer.data = self._fp32_buffers[name].to(buffer.device)
        return self
