"""Data for policy optimization, a reward of any text, and fits of PolicyLM that record what each step measures."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import COMMON, OWN, make_tokenizer
from compared_strategies import RecordMeans, fit_in_steps_of_4
from peft import LoraConfig
from shared_fixtures import make_rows
from transformers import AutoConfig, AutoModelForSequenceClassification

from lit_ft import GRPO, PolicyLM, TextDataModule
from lit_ft.training.policy.rewards import Reward, SampledAnswer

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
SEED = 13
"""Seed with which no draw of these fits is within 2.7e-6 of a tie; splits move cumulative probabilities by 6e-7."""
MEASURED = [f"train/{name}" for name in ("reward", "reward_std", "signal_share", "answer_tokens", "cut_share", "kl")]


class FewLetters(Reward):
    """Reward that differs between the answers of random weights: the share of the commonest letter."""

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        return [max(map(one.answer.count, one.answer), default=0) / (len(one.answer) + 1) for one in answers]


class FewLettersOfRow(FewLetters):
    """The same, where each answer comes with the column ``known`` of the row that asks for it."""

    columns = ("known",)

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        assert [one.columns for one in answers] == [{"known": one.expected} for one in answers]
        return super().of(answers)


def write_questions(folder: Path) -> str:
    """File of 10 unequal conversations; beside it, ``val.json`` with 3 others, and ``asked.json``: without answers."""
    for name, count, seed in (("val.json", 3, 1), ("train.json", 10, 0)):
        rows = [{**row, "known": row["output"]} for row in make_rows(count, seed)]
        (folder / name).write_text(json.dumps(rows), "utf-8")
    (folder / "asked.json").write_text(json.dumps([{**row, "output": ""} for row in make_rows(3, 1)]), "utf-8")
    return str(folder / "train.json")


def slow(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02)


def data_of(path: str, val: str = "val.json", **options: Any) -> TextDataModule:
    given = {"micro_batch_size": 2, "max_length": 96, "val_path": str(Path(path).with_name(val)), **options}
    return TextDataModule(path, **given)


def assert_same_runs(one: Any, other: Any, tolerance: float) -> None:
    """Compare two results of ``fit``; losses are sums around 0, so that their differences count, not their ratios."""
    for got, want in zip(one[0], other[0], strict=True):
        assert got == pytest.approx(want, rel=tolerance, abs=tolerance / 10)
    for means, wanted in zip(one[1], other[1], strict=True):
        assert means == pytest.approx(wanted, rel=10 * tolerance)
    assert one[2].keys() == other[2].keys()
    for name, weight in other[2].items():
        torch.testing.assert_close(one[2][name], weight, atol=tolerance, rtol=tolerance, msg=name)


def fit(make_trainer: Any, folder: str, path: str, how: dict[str, Any], world: int = 1, strategy: Any = "auto") -> Any:
    """Losses, norms and means of two epochs in steps of 4 prompts of 10, validation's means, and the final weights."""
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    model = {"peft": LORA, "algorithm": GRPO(), "answers_per_prompt": 3, "max_new_tokens": 3, **how.get("model", {})}
    module = PolicyLM(folder, rewards=[FewLettersOfRow()], optimizer=how.get("optimizer", slow), **model)
    record = RecordMeans(MEASURED, how.get("save_after"), how.get("save"))
    val, weights = fit_in_steps_of_4(
        make_trainer, module, data_of(path, **how.get("data", {})), record, how, world, strategy
    )
    return record.steps, [*record.means, val], weights


PLAIN = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
"""Another template than that of the model that answers."""


def save_reward_model(folder: Path, architecture: str = "qwen2", **options: Any) -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = options.pop("chat_template", PLAIN)
    form = {"num_hidden_layers": 2, "num_labels": 1, "pad_token_id": tokenizer.eos_token_id, **options}
    config = AutoConfig.for_model(architecture, **{**COMMON, **OWN[architecture], **form})
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def judged_answers() -> list[SampledAnswer]:
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is red?"}]
    texts = ["the red book", "a", "", "the blue lamp is on the table", "<|im_end|>"]
    return [SampledAnswer("", text, "", 1, "stop", {}, asked[i % 2 :]) for i, text in enumerate(texts)]
