"""AdamW's moments of another training, with which a run starts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from lit_ft.errors import RecipeError
from lit_ft.model.files.size_check import shapes_of, weight_files

FOLDER = "optimizer_state"
"""Folder beside a model's weights: one folder of safetensors files per moment, in the weights' shapes and names."""
SETTINGS = "settings.json"
"""File in it: the number of steps that were taken, and the learning rate, betas, epsilon and weight decay."""
MOMENTS = ("exp_avg", "exp_avg_sq")
MODULE = "model."
"""What checkpoints and modules put before Hugging Face's name of a weight."""


class InitialAdamState(Callback):
    """AdamW starts with the moments and the step count of a Megatron training, which ``convert model`` wrote.

    A run that resumes keeps its own. For full fine-tuning on one device or with DDP.
    """

    def __init__(self, folder: str) -> None:
        """Name the moments.

        Args:
            folder: model folder that ``convert model --to hf`` wrote, usually the recipe's model.pretrained.
        """
        self.folder = Path(folder).expanduser() / FOLDER

    def check(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Check that there are moments for what trains, before weights are read.

        Args:
            optimizer: an optimizer of the recipe's class.
            model: model with the names and shapes of Hugging Face's; it may be on the meta device.

        Raises:
            RecipeError: there are no moments, the optimizer is another one, or the moments are those of another model.
        """
        self._check_settings()
        _check_optimizer(optimizer)
        trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for moment in MOMENTS:
            self._files(moment, trains)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there are moments, and that this strategy can take them."""
        if stage != "fit":
            return
        self._check_settings()
        # Others divide or wrap the optimizer's state.
        if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
            raise RecipeError(
                f"InitialAdamState works on one device or with DDP, not with {type(trainer.strategy).__name__}; remove "
                "the callback, or set trainer.strategy: ddp"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fill the optimizer's state, unless the run is resumed.

        Raises:
            RecipeError: the optimizer is another one, or the moments are those of another model.
        """
        if trainer.global_step:
            return
        optimizer = trainer.optimizers[0]
        _check_optimizer(optimizer)
        step = json.loads((self.folder / SETTINGS).read_text(encoding="utf-8"))["step"]
        trains = {name.removeprefix(MODULE): p for name, p in pl_module.named_parameters() if p.requires_grad}
        states: dict[Tensor, dict[str, Any]] = {p: {"step": torch.tensor(float(step))} for p in trains.values()}
        for moment in MOMENTS:
            for name, file in self._files(moment, trains).items():
                with safe_open(file, framework="pt") as opened:
                    states[trains[name]][moment] = opened.get_tensor(name).to(trains[name], copy=True)
        # Not into `optimizer.state` itself: a fused optimizer wants the step count on the device.
        own = [states[p] for group in optimizer.param_groups for p in group["params"]]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(own))})
        rank_zero_info(f"AdamW starts with the moments of {self.folder}, after {step:,} steps")

    def _check_settings(self) -> None:
        if not (self.folder / SETTINGS).is_file():
            raise RecipeError(
                f"InitialAdamState: {self.folder} holds no {SETTINGS}; name a folder of `convert model --to hf` that "
                "says it has the optimizer's state, or remove the callback"
            )

    def _files(self, moment: str, trains: Mapping[str, Tensor]) -> dict[str, Path]:
        """File that holds a moment of each weight, by the weight's name."""
        files = weight_files(self.folder / moment, str(self.folder))
        places = {name: (file, shape) for file in files for name, shape in shapes_of(file, str(self.folder))}
        found = {}
        for name, parameter in trains.items():
            file, shape = places.get(name, (None, None))
            if file is None or shape != tuple(parameter.shape):
                difference = f"is {shape}" if shape else "is missing"
                raise RecipeError(
                    f"InitialAdamState: {moment} of {name} {difference} in {self.folder}, and the weight is "
                    f"{tuple(parameter.shape)}; train all weights (peft: null) of the model that was converted with it"
                )
            found[name] = file
        return found


def _check_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Adam):
        raise RecipeError(
            f"InitialAdamState is for torch.optim.AdamW, not {type(optimizer).__name__}; name it as the optimizer, or "
            "remove the callback"
        )
