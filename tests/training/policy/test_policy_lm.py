"""Policy optimization in one process: against plain transformers, for any split of a step, and after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sampled_answers import LORA, FewLetters, assert_same_runs, data_of, fit, write_questions
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from lit_ft import GRPO, RLOO, DrGRPO, PolicyLM
from lit_ft.model.generation import Sampling, generate_answers
from lit_ft.training.policy.algorithms import Algorithm
from lit_ft.training.policy.rewards import SampledAnswer


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_questions(tmp_path_factory.mktemp("questions"))


def _plain(folder: str, path: str, lr: float, steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Steps of GRPO in full as its paper has it, answer by answer; losses, mean rewards and weights."""
    policy = AutoModelForCausalLM.from_pretrained(folder)
    data, module = data_of(path, shuffle=False), PolicyLM(folder, rewards=[FewLetters()])
    data.load(module.tokenizer)
    samples, losses, means = data.splits["train"], [], []
    for step in range(steps):
        terms, rewards = [], []
        for index in range(4 * step, min(4 * step + 4, len(samples))):
            ids, labels = samples[index]
            first = int((labels != -100).argmax())
            prompt, expected = ids[:first].tolist(), ids[labels != -100].tolist()
            text = f"{step} %d {prompt} {expected}"
            seeds = [_seed(text % answer) for answer in range(3)]
            drawn = Sampling(temperature=1.0, seed=7)
            answers = generate_answers(policy, policy, module.tokenizer, [prompt] * 3, 6, drawn, seeds)
            of = [SampledAnswer("", one.text.strip(), "", 0, None) for one in answers]
            reward = torch.tensor(FewLetters().of(of))
            advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
            rewards.append(reward)
            for one, factor in zip(answers, advantage, strict=True):
                row = torch.tensor([*prompt, *one.ids])[None]
                logits = policy(row).logits[0, len(prompt) - 1 : -1]
                terms.append(factor * cross_entropy(logits, torch.tensor(one.ids)))
        loss = torch.stack(terms).mean()
        policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= lr * parameter.grad
        losses.append(float(loss.detach()))
        means.append(float(torch.cat(rewards).mean()))
    return losses, means, {f"model.{name}": parameter.detach() for name, parameter in policy.named_parameters()}


def _seed(text: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def test_steps_are_those_of_plain_transformers(make_trainer: Any, model_folder: str, questions: str) -> None:
    losses, means, weights = _plain(model_folder, questions, lr=0.1, steps=3)
    how = {"data": {"shuffle": False}, "model": {"peft": None}, "trainer": {"max_steps": 3}}
    steps, measured, found = fit(make_trainer, model_folder, questions, how)
    assert [loss for loss, _ in steps] == pytest.approx(losses, rel=1e-3, abs=1e-6)
    assert [one["train/reward"] for one in measured[:-1]] == pytest.approx(means, rel=1e-5)
    assert max(map(abs, losses)) > 1e-4
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("algorithm", [GRPO(scale_rewards=False), DrGRPO(), RLOO()])
@pytest.mark.parametrize("trains", ["adapter", "everything"])
def test_numbers_do_not_depend_on_the_split(
    make_trainer: Any, model_folder: str, questions: str, algorithm: Algorithm, trains: str
) -> None:
    model = {"algorithm": algorithm, "peft": LORA if trains == "adapter" else None}
    one = fit(make_trainer, model_folder, questions, {"model": model, "data": {"micro_batch_size": 4}})
    for data in ({"micro_batch_size": 1, "join_micro_batches": False}, {"micro_batch_size": 2, "num_workers": 1}):
        assert_same_runs(fit(make_trainer, model_folder, questions, {"model": model, "data": data}), one, 1e-5)
    of_answers = {f"val/{name}" for name in ("reward", "rewards/FewLetters", "cut_share", "answer_tokens")}
    assert one[1][-1].keys() == {"val/loss", "val/perplexity", "val/token_accuracy", *of_answers}


def test_a_resumed_run_draws_the_same_answers(
    make_trainer: Any, model_folder: str, questions: str, tmp_path: Path
) -> None:
    how = {"save_after": 2, "save": str(tmp_path / "two.ckpt")}
    one, means, weights = fit(make_trainer, model_folder, questions, how)
    steps, same, found = fit(make_trainer, model_folder, questions, {"resume": how["save"]})
    assert steps == one[2:]
    assert same == means[2:]
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert len({mean["train/reward"] for mean in means[:-1]}) == len(one)  # each step draws others
