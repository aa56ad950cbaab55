"""Samples that Lightning's sampler repeats, of loaders that are not ``TextDataModule``'s."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lit_ft import CausalLM, TextDataModule


def own_loader(samples: int) -> DataLoader[Any]:
    """Loader of one of two ranks."""
    data = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)}] * samples
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)  # type: ignore[arg-type]
    return DataLoader(data, sampler=sampler)  # type: ignore[arg-type]


def test_repeated_samples_are_named(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    module, trainer = CausalLM(model_folder), make_trainer(max_steps=1, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match="^1 of the 5 training samples counts twice: Lightning's sampler .* each of 2"):
        trainer.fit(module, own_loader(5))
    with pytest.warns(UserWarning, match="^1 of the 3 validation samples counts twice: .* a number .* that 2 divides"):
        trainer.validate(module, own_loader(3))
    with pytest.warns(UserWarning, match="^1 of the 3 test samples counts twice"):
        trainer.test(module, own_loader(3))
    with warnings.catch_warnings(record=True) as said:
        make_trainer(max_steps=1).fit(CausalLM(model_folder), own_loader(4))
        make_trainer(max_steps=1).fit(CausalLM(model_folder), TextDataModule(write_rows()))
    assert not [str(warning.message) for warning in said if "twice" in str(warning.message)]
