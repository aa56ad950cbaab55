"""What stands for another trainer's words exists here."""

from importlib import import_module

import peft
import pytest
import torch
from lightning.pytorch import Trainer

from lit_ft import (
    DPO,
    GRPO,
    KTO,
    DistillationLM,
    JensenShannon,
    OnPolicyDistillationLM,
    PolicyLM,
    PreferenceLM,
    RewardLM,
    TextDataModule,
    schedules,
)
from lit_ft.recipe.other_trainers import CLASSES, OPTIONS
from lit_ft.recipe.parse_errors import options_of_class

SECTIONS = {
    "model.peft": [peft.LoraConfig],
    "model.algorithm": [GRPO],
    "model.objective": [DPO, KTO],
    "model.divergence": [JensenShannon],
    "model": [PreferenceLM, RewardLM, PolicyLM, DistillationLM, OnPolicyDistillationLM],
    "data": [TextDataModule],
    "trainer": [Trainer],
    "optimizer": [torch.optim.AdamW],
    "lr_scheduler": [schedules.CosineWithWarmup],
}


@pytest.mark.parametrize(
    "word", [word for word, ours in OPTIONS.items() if ours.startswith(tuple(f"{s}." for s in SECTIONS))]
)
def test_options_exist(word: str) -> None:
    option = OPTIONS[word].split()[0].strip(",;:()")
    section = next(name for name in SECTIONS if option.startswith(f"{name}."))
    assert any(option.removeprefix(f"{section}.") in options_of_class(cls) for cls in SECTIONS[section])


@pytest.mark.parametrize(
    "path", sorted({path.split()[0].strip(";") for path in CLASSES.values() if "." in path.split()[0]})
)
def test_classes_exist(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)
