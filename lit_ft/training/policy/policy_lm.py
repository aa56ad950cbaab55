"""The LightningModule of policy optimization."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.phases import within_a_step
from peft import PeftModel
from torch import Tensor

from lit_ft import process
from lit_ft.errors import RecipeError, check_counts, check_types
from lit_ft.internals.peft import virtual_tokens
from lit_ft.model.config.positions import check_positions
from lit_ft.model.generation import GREEDY
from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.process import datamodule_of
from lit_ft.protocols import GivesFirstBatches
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.policy.algorithms import GRPO, Algorithm, check_algorithm
from lit_ft.training.policy.answers_file import AnswersFile
from lit_ft.training.policy.metrics import OF_ANSWERS, OF_GROUPS, PolicyMetrics, RewardMetrics
from lit_ft.training.policy.reference import loss_of_answers, reference_losses
from lit_ft.training.policy.rewards import OverlongPenalty, Reward, rewards_of
from lit_ft.training.policy.rollouts import Rollouts, asked_of, batch_of, with_known_answers
from lit_ft.training.policy.sampled_answers import SampledAnswersModule
from lit_ft.tuning.spec import TuningSpec

STEPS_WITHOUT_SIGNAL = 10
"""Optimizer steps without any difference between rewards, after which a line says so."""


class PolicyLM(SampledAnswersModule, CausalLM):
    """Fine-tune a causal language model on answers that it gives itself, by rewards of them: GRPO, DAPO, RLOO.

    It takes the data of supervised training: a sample's last answer is the one that is known, and all before it is the
    prompt. In each optimizer step the model gives several answers to each prompt, drawn from its own probabilities
    (temperature 1). The loss is the mean over the answers, or their tokens, of the whole optimizer step.

    Logged: ``train/{loss,reward,rewards/<name>,reward_std,signal_share,answer_tokens,cut_share}``, means over answers
    or prompts of one optimizer step; ``{val,test}/{reward,rewards/<name>,answer_tokens,cut_share}`` of greedy answers,
    beside loss, perplexity and token accuracy of the known ones; ``.../reward/<source>`` where the data has several
    sources; and otherwise what ``CausalLM`` logs.
    """

    measured_of_own = "val/reward with mode: max"

    def __init__(
        self,
        pretrained: str,
        rewards: list[Reward] | None = None,
        reward_weights: list[float] | None = None,
        algorithm: Algorithm | None = None,
        answers_per_prompt: int = 8,
        answers_at_once: int = 128,
        train_on_cut_answers: bool = True,
        kl_weight: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """Say what is trained and how.

        Args:
            pretrained: base model, a Hugging Face hub id or a folder with config.json, weights and tokenizer.
            rewards: what an answer is worth, a list of classes: lit_ft.ExactAnswer, lit_ft.FinalNumber,
                lit_ft.Similarity, lit_ft.Matches, lit_ft.OverlongPenalty, lit_ft.RewardModel, or your own
                lit_ft.training.policy.rewards.Reward.
            reward_weights: factor on each of them in their sum; null is 1 for each.
            algorithm: weights of answers from their rewards, by class_path: lit_ft.GRPO, lit_ft.DrGRPO, lit_ft.DAPO,
                lit_ft.RLOO, or your own lit_ft.training.policy.algorithms.Algorithm. null is GRPO.
            answers_per_prompt: number of answers to each prompt in a step, 2 or more.
            answers_at_once: largest number of answers that are generated together, of all micro-batches of a step; more
                take less time, and more memory for keys and values.
            train_on_cut_answers: whether answers that max_new_tokens cuts are trained on; with false they only count in
                the rewards that others are compared with.
            kl_weight: weight of the divergence from the base model in the loss, e.g. 0.04 (GRPO's beta), which holds
                the model near to it; for a new adapter (peft). 0 leaves it out.
            **kwargs: the other options of ``CausalLM``; max_new_tokens is the length of the longest answer.
        """
        check_types("model", PolicyLM.__init__, {name: value for name, value in locals().items() if name != "kwargs"})
        super().__init__(pretrained, **kwargs)
        if self.spec.token_weights is not None:
            raise RecipeError(
                f"model.token_weights={self.spec.token_weights!r} with {type(self).__name__}, where the weights of "
                "tokens come from rewards; leave token_weights out"
            )
        if answers_per_prompt < 2:
            raise RecipeError(
                f"model.answers_per_prompt={answers_per_prompt} must be 2 or more: answers to one prompt are compared"
            )
        check_counts("model", answers_at_once=answers_at_once)
        self.rewards, self.reward_weights = _checked(rewards, reward_weights)
        _check_penalties(self.rewards, self.max_new_tokens)
        self.algorithm = algorithm or GRPO()
        check_algorithm(self.algorithm, answers_per_prompt)
        self.answers_per_prompt, self.answers_at_once = answers_per_prompt, answers_at_once
        self.train_on_cut_answers, self.kl_weight = train_on_cut_answers, kl_weight
        _check_kl(kl_weight, self.spec.tuning)
        self.reward_names = names = _unlike([reward.name for reward in self.rewards])
        of_steps = (f"train/{name}" for name in (*OF_GROUPS, *(["kl"] if kl_weight else [])))
        of_known = (f"{split}/{name}" for split in ("val", "test") for name in CausalLM.measured)
        self.measured = (*OF_ANSWERS, *(f"rewards/{name}" for name in names), *of_steps, *of_known)
        self.train_metrics: PolicyMetrics = PolicyMetrics(names, self.spec.router_aux_loss is not None, kl_weight > 0)
        self.val_metrics: RewardMetrics = RewardMetrics(names)
        self.test_metrics: RewardMetrics = RewardMetrics(names)
        self._steps_without_signal, self._file = 0, AnswersFile(names)

    def check_length(self, what: str, length: int | None) -> None:
        """Refuse samples that leave no positions for an answer; see ``LimitsLengths``."""
        config, virtual = self.spec.base.config, virtual_tokens(self.spec.tuning.peft)
        longest = None if length is None else length + self.max_new_tokens
        what, fix = f"{what} with an answer", "set data.max_length or model.max_new_tokens lower"
        check_positions(config, longest, what, f"model.pretrained={self.spec.base.pretrained!r}", fix, virtual)

    def setup(self, stage: str) -> None:
        """Try the rewards on known answers of the data, before weights are read."""
        super().setup(stage)
        for reward in self.rewards:
            reward.device = self.trainer.strategy.root_device
        self.check_data(datamodule_of(self._trainer), stage)

    def check_data(self, data: object, stage: str) -> None:
        """Try the rewards on known answers of the data; see ``ChecksData``."""
        for reward in self.rewards if stage != "predict" else ():
            reward.check()
        if stage == "fit" and isinstance(data, GivesFirstBatches):
            self.rewards_of_known(data)

    def rewards_of_known(self, data: GivesFirstBatches) -> dict[str, list[float]]:
        """Rewards of the known answers of the first micro-batch, by the names of the rewards in metrics.

        Those that use the device are tried on the rank that computes them, once there is a run.

        Raises:
            RecipeError: samples have no prompt, or a reward fails.
        """
        asked = [one for batch in data.first_batches(1) for one in asked_of(batch)]
        known = self.known_answers([one for one in asked if one.row.has_answer] or asked)
        leads = self._trainer is not None and process.leads_replica(self._trainer)
        named = zip(self.reward_names, self.rewards, strict=True)
        return {name: rewards_of(reward, known) for name, reward in named if leads or not reward.uses_device}

    # --- answers ---------------------------------------------------------------------------------

    def on_after_batch_transfer(self, batch: PackedBatch, dataloader_idx: int) -> PackedBatch:
        """In training, answer the prompts of a batch, and put the batch that trains on the answers in its place."""
        if not self.trainer.training:
            return batch
        given = self._packed.as_packed_batch(batch)
        rollouts, of_step = self.rollouts_in_step(given, self.answers_per_prompt)
        weights, kl_weights = self._weights(rollouts)
        terms = self._terms(rollouts), kl_weights, self.algorithm.counts_tokens
        trained = batch_of(rollouts, weights, given, self.device, *terms)
        if "window_tokens" in given:
            trained["window_tokens"] = self._terms(of_step)
        self.train_metrics.add_rollouts(rollouts, given)
        self.train_metrics.add_groups(rollouts, weights)
        self._file.add(self.trainer, rollouts)
        return self._with_reference(trained)

    def _weights(self, rollouts: Rollouts) -> tuple[Tensor, Tensor | None]:
        """Factors on the cross-entropy, and on the divergence, of each token of an answer, ``(P, G)``."""
        total = rollouts.total
        advantages = self.algorithm.advantages(total) if rollouts.asked else total
        of_token = self.algorithm.token_weight(rollouts.tokens, self.max_new_tokens) if rollouts.asked else total
        if not self.train_on_cut_answers:
            of_token = of_token.masked_fill(rollouts.is_cut, 0.0)
        return advantages * of_token, self.kl_weight * of_token if self.kl_weight else None

    def _terms(self, rollouts: Rollouts) -> int:
        """What the loss of answers is a mean over: their number, or that of their tokens."""
        if not self.algorithm.counts_tokens:
            return rollouts.total.numel()
        counted = rollouts.tokens if self.train_on_cut_answers else rollouts.tokens.masked_fill(rollouts.is_cut, 0.0)
        return int(counted.sum())

    def _with_reference(self, batch: PackedBatch) -> PackedBatch:
        """A batch of answers with what the reference finds of them, where their divergence has a part in the loss."""
        if not self.kl_weight:
            return batch
        batch["target_reference"] = torch.zeros_like(batch["target_weights"])
        if batch["segment_lengths"]:
            assert isinstance(self.model, PeftModel), "others are refused"
            with self.apart_from_training(), within_a_step(self.trainer, self, "forward"):
                self.eval()
                is_new = self.trainer.global_step == 0
                batch["target_reference"] = reference_losses(self, self.model, batch, is_new)
        return batch

    def on_validation_batch_start(self, batch: object, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count the rewards of greedy answers into the means of val."""
        super().on_validation_batch_start(batch, batch_idx, dataloader_idx)
        self._add_greedy(batch, self.val_metrics)

    def on_test_batch_start(self, batch: object, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count the rewards of greedy answers into the means of test."""
        super().on_test_batch_start(batch, batch_idx, dataloader_idx)
        self._add_greedy(batch, self.test_metrics)

    def _add_greedy(self, batch: Any, metrics: RewardMetrics) -> None:
        given = self._packed.as_packed_batch(batch)
        rollouts = self.rollouts(asked_of(given), 1, GREEDY, is_computed=bool(given["segment_lengths"]))
        metrics.add_rollouts(rollouts, given)

    def on_validation_start(self) -> None:
        """Measure the loss of known answers where there are any."""
        super().on_validation_start()
        self.val_metrics.has_known_answers = self.has_known_answers("val")

    def on_test_start(self) -> None:
        """Measure the loss of known answers where there are any."""
        super().on_test_start()
        self.test_metrics.has_known_answers = self.has_known_answers("test")

    # --- step ------------------------------------------------------------------------------------

    def validation_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count known answers into the means of val."""
        if self.val_metrics.has_known_answers:
            super().validation_step(with_known_answers(self._packed.as_packed_batch(batch)), batch_idx)

    def test_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count known answers into the means of test."""
        if self.test_metrics.has_known_answers:
            super().test_step(with_known_answers(self._packed.as_packed_batch(batch)), batch_idx)

    def token_loss(self, hidden: Tensor, batch: PackedBatch) -> TokenLoss:
        """Summed loss of the model's answers, from final hidden states ``(1, T, H)``; cross-entropy of other texts."""
        if "target_kl_weights" in batch:
            return self._packed.token_loss(hidden, batch, loss_of_answers(batch))
        if "target_weights" in batch:
            return self._packed.token_loss(hidden, batch, batch["target_weights"])
        return super().token_loss(hidden, batch)

    def _log_step(self) -> None:
        super()._log_step()
        self._steps_without_signal = 0 if self.train_metrics.has_signal else self._steps_without_signal + 1
        if self._steps_without_signal == STEPS_WITHOUT_SIGNAL:
            cut = "" if self.train_on_cut_answers else ", or were cut (model.train_on_cut_answers=false)"
            rank_zero_warn(
                f"model.rewards: in {STEPS_WITHOUT_SIGNAL} optimizer steps rewards have trained nothing: all answers "
                f"to each prompt had the same one{cut}. Begin with a model that is right at times (train on known "
                "answers first), take rewards that tell wrong answers apart (lit_ft.Similarity), or raise "
                "model.answers_per_prompt"
            )

    def describe_training(self) -> str:
        """Text on whose answers train it, and by what; see ``DescribesTraining``."""
        return self.describe_policy()

    def describe_policy(self) -> str:
        """Text on how many answers train it, and by which rewards."""
        weighted = zip(self.reward_weights, self.rewards, strict=True)
        rewards = " + ".join(repr(reward) if factor == 1 else f"{factor:g} {reward!r}" for factor, reward in weighted)
        kl = f", kl_weight={self.kl_weight:g}" if self.kl_weight else ""
        return f"{self.answers_per_prompt} answers of its own to each prompt, by {self.algorithm!r} of {rewards}{kl}"


def _checked(rewards: list[Reward] | None, factors: list[float] | None) -> tuple[list[Reward], list[float]]:
    """Rewards and their factors.

    Raises:
        RecipeError: there is no reward, or the numbers of both differ, or a factor changes nothing.
    """
    if not rewards:
        raise RecipeError(
            "model.rewards is not set; say what an answer is worth, e.g. rewards: [{class_path: lit_ft.ExactAnswer}]"
        )
    for reward in rewards:
        if isinstance(reward.columns, str) or not all(isinstance(name, str) for name in reward.columns):
            raise RecipeError(
                f"model.rewards: {reward.name}.columns={reward.columns!r} must list names of columns, e.g. ('tests',)"
            )
    if factors is not None and len(factors) != len(rewards):
        raise RecipeError(
            f"model.reward_weights={factors} has {len(factors)} numbers for {len(rewards)} rewards; give one for each"
        )
    if wrong := [factor for factor in factors or [] if not math.isfinite(factor) or factor == 0]:
        raise RecipeError(f"model.reward_weights: {wrong[0]} must be finite and not 0; leave a reward of no weight out")
    return list(rewards), [1.0] * len(rewards) if factors is None else [float(factor) for factor in factors]


def _check_kl(weight: float, tuning: TuningSpec) -> None:
    """Refuse a divergence from a reference that there is none of.

    Raises:
        RecipeError: the weight is below 0, or the model has no new adapter, without which it is the base model.
    """
    if not 0 <= weight < math.inf:
        raise RecipeError(f"model.kl_weight={weight} must be 0 or above, and finite")
    if weight and tuning.given is not None:
        raise RecipeError(
            f"model.kl_weight={weight:g} compares the model with itself without its adapter, which is not what "
            "model.adapter makes of it; merge that adapter (export --merge), and train a new one on the merged model"
        )
    if weight and (tuning.peft is None or tuning.peft.is_prompt_learning):
        method = "all weights train" if tuning.peft is None else f"{type(tuning.peft).__name__} is no part of layers"
        raise RecipeError(
            f"model.kl_weight={weight:g} compares the model with itself without its adapter, and {method}; take LoRA "
            "(model.peft), or set kl_weight to 0"
        )


def _check_penalties(rewards: Sequence[Reward], max_new_tokens: int) -> None:
    """Refuse penalties of lengths that no answer has.

    Raises:
        RecipeError: there is one.
    """
    for reward in rewards:
        if isinstance(reward, OverlongPenalty) and reward.max_tokens > max_new_tokens:
            raise RecipeError(
                f"model.rewards: {reward!r} with model.max_new_tokens={max_new_tokens}: no answer is as long as "
                f"max_tokens={reward.max_tokens}; set it to model.max_new_tokens or lower"
            )


def _unlike(names: Sequence[str]) -> list[str]:
    """Names of rewards in metrics, numbered where there are several of one class: ``Matches``, ``Matches_2``."""
    numbers = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if number == 1 else f"{name}_{number}" for name, number in zip(names, numbers, strict=True)]
