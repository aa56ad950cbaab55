import os
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from compared_strategies import Record, assert_same, fit_in_steps_of_4, sgd
from peft import LoraConfig, LoraGAConfig
from ranks import LiveRanks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from lit_ft import DFT, DPO, CausalLM, PreferenceLM, RecipeError, TextDataModule
from lit_ft.export.folder_texts import run_texts
from lit_ft.run.folder import RunFolder
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lit_ft.training.loss.token_cross_entropy import token_cross_entropy
from lit_ft.training.loss.token_weights import TokenWeights


def _weighted(losses: Tensor) -> Tensor:
    """Summed loss of dynamic fine-tuning, as its paper has it."""
    return (losses * torch.exp(-losses).detach()).sum()


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("trains_head", [True, False])
def test_gradients_equal_those_of_the_formula(chunk_tokens: int, trains_head: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 13, dtype=torch.float64).requires_grad_(trains_head)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (11,))
    trained = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    plain = cross_entropy(head(hidden), targets, reduction="none")
    calls = []

    def counted(part: Tensor) -> Tensor:
        calls.append(len(part))
        return head(part)

    result = token_cross_entropy(hidden, counted, targets, chunk_tokens, list(head.parameters()), loss_of=DFT())
    assert sum(calls) == len(targets)  # no logits are computed twice
    torch.testing.assert_close(result.per_token, plain.detach().float())
    torch.testing.assert_close(result.loss_sum, _weighted(plain).float())
    wanted = torch.autograd.grad(0.3 * _weighted(plain), trained)
    for found, grad in zip(torch.autograd.grad(0.3 * result.loss_sum, trained), wanted, strict=True):
        torch.testing.assert_close(found, grad, atol=1e-6, rtol=1e-6)  # the loss itself is taken in fp32


def _fit(make_trainer: Any, folder: str, path: str, how: dict[str, Any]) -> Any:
    os.environ["PL_GLOBAL_SEED"] = "3"
    world, replicas, strategy = how.get("ranks", (1, 1, "auto"))
    module = CausalLM(folder, optimizer=sgd, token_weights=DFT(), **how.get("model", {}))
    options = {"micro_batch_size": 2, "max_length": 96, "val_path": path.replace("rows.json", "val.json")}
    data, record, every = TextDataModule(path, **options | how.get("data", {})), Record(None, None), []
    record.on_train_epoch_end = lambda trainer, _: every.append(dict(trainer.callback_metrics))
    _, weights = fit_in_steps_of_4(make_trainer, module, data, record, {"replicas": replicas}, world, strategy)
    means = {name: float(value) for name, value in every[-1].items()}
    return record.steps, means, weights


def _plain(folder: str, path: str, lr: float) -> tuple[list[float], dict[str, Tensor]]:
    """An epoch in full with plain transformers, sample by sample."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    data = TextDataModule(path, max_length=96)
    data.load(CausalLM(folder).tokenizer)
    samples, losses = data.splits["train"], []
    for start in range(0, len(samples), 4):
        total, count = torch.zeros(()), 0
        for i in range(start, min(start + 4, len(samples))):
            ids, labels = (torch.as_tensor(part.astype("int64")) for part in samples[i])
            logits = model(ids[None]).logits[0, :-1]
            total = total + _weighted(cross_entropy(logits, labels[1:], ignore_index=-100, reduction="none"))
            count += int((labels[1:] != -100).sum())
        model.zero_grad()
        (total / count).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
        losses.append(float(total.detach() / count))
    return losses, {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


EVERYTHING: dict[str, Any] = {"data": {"shuffle": False}}


def test_steps_are_those_of_plain_transformers(make_trainer: Any, model_folder: str, rows: str) -> None:
    losses, weights = _plain(model_folder, rows, lr=0.1)
    make = lambda **options: make_trainer(**options | {"max_epochs": 1})  # noqa: E731
    steps, means, found = _fit(make, model_folder, rows, EVERYTHING)
    assert [loss for loss, _ in steps] == pytest.approx(losses, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4)
    assert means["train/loss"] < 0.5 * means["train/cross_entropy"]
    assert means["train/perplexity"] == pytest.approx(torch.tensor(means["train/cross_entropy"]).exp().item())
    assert means["val/perplexity"] == pytest.approx(torch.tensor(means["val/loss"]).exp().item())


LORA = {"model": {"peft": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")}}


@pytest.mark.parametrize("how", [EVERYTHING, LORA])
def test_numbers_do_not_depend_on_the_split(make_trainer: Any, model_folder: str, rows: str, how: Any) -> None:
    one, means, weights = _fit(make_trainer, model_folder, rows, how)
    data = {**how.get("data", {}), "micro_batch_size": 1, "join_micro_batches": False}
    steps, same, found = _fit(make_trainer, model_folder, rows, {**how, "data": data})
    assert_same(steps, found, one, weights, 1e-5)
    assert same == pytest.approx(means, rel=1e-4, abs=1e-5)


ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
STRATEGIES: dict[str, tuple[int, int, Any]] = {
    "ddp": (2, 2, "ddp"),
    "fsdp": (2, 2, FSDPStrategy),
    "zero3": (2, 2, partial(DeepSpeedStrategy, config=ZERO3)),
    "tp2": (2, 1, partial(ModelParallelStrategy, tensor_parallel_size=2)),
    "cp2": (2, 1, partial(ModelParallelStrategy, context_parallel_size=2)),
    "pp2": (2, 1, partial(ModelParallelStrategy, pipeline_parallel_size=2)),
}
"""Each with its numbers of ranks and of replicas."""


@pytest.mark.processes
@pytest.mark.xdist_group("token_weights")
@pytest.mark.parametrize("name", STRATEGIES)
def test_same_numbers_on_ranks(
    make_trainer: Any, model_folder: str, rows: str, kept: dict[str, Any], live_ranks: LiveRanks, name: str
) -> None:
    if not kept:
        kept["one"] = _fit(make_trainer, model_folder, rows, EVERYTHING)
    one, means, weights = kept["one"]
    how = {**EVERYTHING, "ranks": STRATEGIES[name]}
    ranks = live_ranks(2, _fit, make_trainer, model_folder, rows, how, timeout=100)
    for steps, same, _ in ranks:
        assert_same(steps, ranks[0][2], one, weights, 2e-5)
        assert same == pytest.approx(means, rel=1e-4, abs=1e-5)


def test_an_init_sees_the_weighted_loss(make_trainer: Any, model_folder: str, rows: str) -> None:
    adapters = []
    for weights in (None, DFT()):
        lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
        module = CausalLM(model_folder, peft=lora, token_weights=weights)
        make_trainer(max_steps=1, limit_val_batches=0).fit(module, TextDataModule(rows, max_length=96))
        assert module.start is not None
        adapters.append(module.start)
    assert str(adapters[0]) != str(adapters[1])


class Negative(TokenWeights):
    def of(self, cross_entropy: Tensor) -> Tensor:
        return -cross_entropy


class OfTheBatch(TokenWeights):
    def of(self, cross_entropy: Tensor) -> Tensor:
        return cross_entropy.mean()


class OfTheBest(TokenWeights):
    def of(self, cross_entropy: Tensor) -> Tensor:
        return torch.exp(cross_entropy.min() - cross_entropy)


class OfAnyToken(TokenWeights):
    def of(self, cross_entropy: Tensor) -> Tensor:
        if not len(cross_entropy):
            raise ValueError("no first token")
        return torch.ones_like(cross_entropy)


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (OfTheBest(), "one by one; compute the factor of a token from it alone, because tokens come in parts of a"),
        (OfAnyToken(), "no first token; fix OfAnyToken: a micro-batch may have no supervised token"),
        (Negative(), "Negative.of gives [-0.0, -1.0, -8.0] for cross-entropies of [0.0, 1.0, 8.0]; factors must be 0"),
        (OfTheBatch(), "OfTheBatch.of gives a tensor of shape () for 3 tokens; return one number for each"),
    ],
)
def test_own_weights_are_tried_at_once(model_folder: str, weights: TokenWeights, why: str) -> None:
    with pytest.raises(RecipeError) as error:
        CausalLM(model_folder, token_weights=weights)
    assert why in str(error.value)


def test_pairs_have_no_token_weights(model_folder: str) -> None:
    with pytest.raises(RecipeError, match="the loss of a pair is the objective's; leave token_weights out"):
        PreferenceLM(model_folder, objective=DPO(), token_weights=DFT())


class Power(TokenWeights):
    """Weights with options, and with state that is none of them."""

    def __init__(self, power: float = 0.5, kind: str = "power") -> None:
        self.power, self.kind, self.calls = power, kind, 0

    def of(self, cross_entropy: Tensor) -> Tensor:
        self.calls += 1
        return torch.exp(-self.power * cross_entropy)


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (None, DFT(), r"the checkpoint was trained with none, and goes on with DFT\(\)"),
        (Power(), None, r"was trained with Power\(power=0.5, kind='power'\), and goes on with none"),
        (Power(), Power(1), r"trained with Power\(power=0.5, kind='power'\), and goes on with Power\(power=1, kind="),
        (Power(), Power(), None),
    ],
)
def test_weights_that_change_are_named(
    make_trainer: Any, model_folder: str, rows: str, tmp_path: Any, before: Any, now: Any, line: str | None
) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(CausalLM(model_folder, peft=lora, token_weights=before), TextDataModule(rows, max_length=96))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    module = CausalLM(model_folder, peft=lora, token_weights=now)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_steps=2, limit_val_batches=0).fit(
            module, TextDataModule(rows, max_length=96), ckpt_path=str(tmp_path / "one.ckpt")
        )
    found = [str(one.message) for one in caught if "model.token_weights" in str(one.message)]
    assert len(found) == (line is not None)
    assert line is None or re.search(line, found[0])


def test_a_card_names_the_weights(make_trainer: Any, model_folder: str, rows: str, tmp_path: Any) -> None:
    module = CausalLM(model_folder, peft=LoraConfig(r=4, target_modules=["q_proj"]), token_weights=DFT())
    trainer = make_trainer(max_steps=1, limit_val_batches=0, log_every_n_steps=1)
    trainer.fit(module, TextDataModule(rows, max_length=96))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    card = run_texts("adapter", RunFolder(tmp_path), module, logged, {})["README.md"]
    assert "Trained with tokens weighted in the loss by `DFT()`." in card
    assert "| train/cross_entropy |" in card
    assert "train/cross_entropy" in trainer.progress_bar_metrics  # the loss with weights says little by itself
