"""A teacher, and fits of models that learn its probabilities, which record what each step measures."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compared_strategies import RecordMeans, fit_in_steps_of_4
from sampled_answers import LORA, SEED, data_of
from shared_fixtures import tiny_qwen2

from lit_ft import DistillationLM, OnPolicyDistillationLM

MEASURED = [f"train/{name}" for name in ("divergence", "cross_entropy", "token_accuracy", "answer_tokens", "cut_share")]


def write_teacher(folder: Path, **changes: Any) -> str:
    """Folder of a model with other weights and other sizes than that of most tests: more layers, wider, more ids."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 400, "initializer_range": 0.15}
    model, tokenizer = tiny_qwen2(**{**sizes, **changes})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def steady(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def fit(
    make_trainer: Any,
    folders: Sequence[str],
    path: str,
    how: dict[str, Any],
    world: int = 1,
    strategy: Any = "auto",
) -> Any:
    """Losses, norms and means of two epochs in steps of 4 of 10 samples, validation's means, and the final weights.

    Args:
        make_trainer: function that makes a trainer.
        folders: student and teacher.
        path: file of the data.
        how: ``model`` and ``data`` (options), ``optimizer``, ``save_after``, ``save``, and those of
            ``fit_in_steps_of_4``; a model with ``on_policy`` answers prompts itself.
        world: number of ranks.
        strategy: strategy, or what makes it.
    """
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    student, teacher = folders
    options = {"peft": LORA, "teacher": teacher, "optimizer": how.get("optimizer", steady), **how.get("model", {})}
    if "on_policy" in options:
        module: DistillationLM = OnPolicyDistillationLM(student, **{"max_new_tokens": 3, **options})
    else:
        module = DistillationLM(student, **options)
    record = RecordMeans(MEASURED, how.get("save_after"), how.get("save"))
    data = data_of(path, **how.get("data", {}))
    val, weights = fit_in_steps_of_4(make_trainer, module, data, record, how, world, strategy)
    return record.steps, [*record.means, val], weights
