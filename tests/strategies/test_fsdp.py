"""FSDP2 with shards in host memory, on a device that is not the host."""

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_ft.strategies import FSDPStrategy
from lit_ft.training.metrics import StageMetrics


class Measured(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weights, self.metrics = nn.Linear(2, 2), StageMetrics()


def test_weights_alone_stay_in_host_memory() -> None:
    strategy = FSDPStrategy(cpu_offload=True)
    strategy.parallel_devices = [torch.device("meta")]
    module = Measured()
    strategy.connect(module)
    strategy._place()
    assert module.weights.weight.device.type == "cpu"
    assert module.device.type == module.metrics.loss.total.device.type == "meta"
