"""Distillation on answers that the student gives itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lit_callbacks.output.quantities import as_count
from torch import Tensor

from lit_ft.errors import RecipeError, check_counts, check_types
from lit_ft.model.generation import GREEDY
from lit_ft.packed_batch import PackedBatch
from lit_ft.protocols import RowNeeds
from lit_ft.training.distillation.distillation_lm import DistillationLM
from lit_ft.training.distillation.divergences import Divergence, ReverseKL
from lit_ft.training.distillation.metrics import DistillationMetrics
from lit_ft.training.metrics import TokenMean
from lit_ft.training.policy.answers_file import AnswersFile
from lit_ft.training.policy.rollouts import Rollouts, asked_of, packed_answers, with_known_answers
from lit_ft.training.policy.sampled_answers import SampledAnswersModule

OF_ANSWERS = ("answer_tokens", "cut_share")


class OnPolicyMetrics(DistillationMetrics):
    """What ``DistillationMetrics`` measures, and of the student's answers the mean length and the share that is cut.

    Where no row has a known answer, a validation measures the divergence of the student's own answers, and no loss.
    """

    def __init__(self, has_router_loss: bool = False) -> None:
        super().__init__(has_router_loss)
        self.of_answers = TokenMean((len(OF_ANSWERS),))
        self.has_known_answers = True
        self._has_answers = False
        """Whether the step trains on answers of the student; the same on all ranks."""

    def add_answers(self, rollouts: Rollouts) -> None:
        """Add answers that train."""
        measured = torch.stack([rollouts.tokens.double().sum(), rollouts.is_cut.double().sum()])
        self.of_answers.update(measured.to(self.of_answers.total), rollouts.total.numel())
        self._has_answers = True

    def _means(self, loss: Tensor) -> dict[str, Tensor]:
        return super()._means(loss) if self.has_known_answers else {"divergence": self.divergence.compute()}

    def _further_means(self, loss: Tensor) -> dict[str, Tensor]:
        means = super()._further_means(loss)
        if self._has_answers:
            means |= dict(zip(OF_ANSWERS, self.of_answers.compute().unbind(), strict=True))
        self._has_answers = False
        return means


class OnPolicyDistillationLM(SampledAnswersModule, DistillationLM):
    """Fine-tune a causal language model on the probabilities of its teacher, over answers that it gives itself (GKD).

    It takes the data of supervised training, as ``PolicyLM`` does: all before a sample's last answer is the prompt. The
    student answers it with draws from its own probabilities (temperature 1), and learns the teacher's probabilities of
    each token of its answer. Gradients do not go through the draws (Agarwal et al. 2024, arXiv:2306.13649, section 3).
    Where all steps are of that kind, samples need no answer.

    Logged: ``train/{answer_tokens,cut_share}``, means over the student's answers of one optimizer step, and otherwise
    what ``DistillationLM`` logs.
    """

    measured_of_own = "val/divergence with mode: min"
    measured: Sequence[str] = (*DistillationLM.measured, *(f"train/{name}" for name in OF_ANSWERS))

    def __init__(
        self,
        pretrained: str,
        teacher: str | None = None,
        divergence: Divergence | None = None,
        on_policy: float = 1.0,
        answers_per_prompt: int = 1,
        answers_at_once: int = 128,
        **kwargs: Any,
    ) -> None:
        """Say what is trained, by which teacher.

        Args:
            pretrained: base model, a Hugging Face hub id or a folder with config.json, weights and tokenizer.
            teacher: model whose probabilities are learned, a hub id or a folder, with the same tokenizer. It is not
                trained, and is in no checkpoint.
            divergence: from the teacher, by class_path: lit_ft.ForwardKL, lit_ft.ReverseKL, lit_ft.JensenShannon, or
                your own lit_ft.training.distillation.divergences.Divergence. null is ReverseKL.
            on_policy: share of optimizer steps that train on the student's answers, above 0, up to 1, evenly spread;
                the others train on those of the data.
            answers_per_prompt: number of answers to each prompt in a step.
            answers_at_once: largest number of answers that are generated together, of all micro-batches of a step; more
                take less time, and more memory for keys and values.
            **kwargs: the other options of ``DistillationLM`` and ``CausalLM``; max_new_tokens is the length of the
                longest answer, kd_ratio counts in steps on answers of the data.
        """
        check_types("model", OnPolicyDistillationLM.__init__, {k: v for k, v in locals().items() if k != "kwargs"})
        super().__init__(pretrained, teacher=teacher, divergence=divergence, **kwargs)
        check_counts("model", answers_per_prompt=answers_per_prompt, answers_at_once=answers_at_once)
        if not 0 < on_policy <= 1:
            raise RecipeError(
                f"model.on_policy={on_policy} must be above 0 and up to 1, the share of steps on the student's own "
                "answers; for none take model.class_path=lit_ft.DistillationLM"
            )
        if on_policy == 1 and self.kd_ratio < 1:
            raise RecipeError(
                f"model.kd_ratio={self.kd_ratio} with model.on_policy=1: cross-entropy has no part in steps on the "
                "student's own answers, and there are no others; leave kd_ratio out, or set on_policy below 1"
            )
        self.on_policy, self.answers_per_prompt, self.answers_at_once = on_policy, answers_per_prompt, answers_at_once
        self.trains_on_data = on_policy < 1
        self.train_metrics: OnPolicyMetrics = OnPolicyMetrics(self.spec.router_aux_loss is not None)
        self.val_metrics: OnPolicyMetrics = OnPolicyMetrics()
        self.test_metrics: OnPolicyMetrics = OnPolicyMetrics()
        self._file = AnswersFile(())

    @property
    def row_needs(self) -> RowNeeds:
        """What is read of the rows of the data; see ``SamplesAnswers``."""
        return RowNeeds({}, None, may_lack_answers=not self.trains_on_data)

    @staticmethod
    def _default_divergence() -> Divergence:
        return ReverseKL()

    def check_length(self, what: str, length: int | None) -> None:
        """Refuse samples that leave no positions for an answer; see ``LimitsLengths``."""
        super().check_length(f"{what} with an answer", None if length is None else length + self.max_new_tokens)

    def on_after_batch_transfer(
        self, batch: PackedBatch | Mapping[str, Tensor], dataloader_idx: int
    ) -> PackedBatch | Mapping[str, Tensor]:
        """In its share of steps, answer the prompts of a batch, and put the answers in the place of the data's."""
        if self.trainer.predicting:
            return batch
        given = self._packed.as_packed_batch(batch)
        if not self.trainer.training:
            return self._evaluated(given)
        if not self._answers_in_step(self.trainer.global_step):
            return super().on_after_batch_transfer(given, dataloader_idx)
        rollouts, of_step = self.rollouts_in_step(given, self.answers_per_prompt)
        trained = packed_answers(rollouts, range(len(rollouts.ids)), given, self.device)
        if "window_tokens" in given:
            trained["window_tokens"] = int(of_step.tokens.sum())
        if "source_names" in given:
            trained["source_names"], trained["window_sources"] = given["source_names"], given["window_sources"]
        self.train_metrics.add_answers(rollouts)
        self._file.add(self.trainer, rollouts)
        return self._with_teacher(trained, 1.0)

    def _evaluated(self, given: PackedBatch) -> PackedBatch:
        """The known answers of a batch of the data, or greedy ones of the student where its split has none."""
        if self._metrics_of_stage().has_known_answers:
            return self._with_teacher(with_known_answers(given), self.kd_ratio)
        rollouts = self.rollouts(asked_of(given), 1, GREEDY, is_computed=bool(given["segment_lengths"]))
        return self._with_teacher(packed_answers(rollouts, range(len(rollouts.ids)), given, self.device), 1.0)

    def on_validation_start(self) -> None:
        """Measure the known answers where there are any."""
        super().on_validation_start()
        self.val_metrics.has_known_answers = self.has_known_answers("val")

    def on_test_start(self) -> None:
        """Measure the known answers where there are any."""
        super().on_test_start()
        self.test_metrics.has_known_answers = self.has_known_answers("test")

    def _answers_in_step(self, step: int) -> bool:
        return int((step + 1) * self.on_policy) > int(step * self.on_policy)

    def describe_policy(self) -> str:
        """Text on how many answers train it; see ``SamplesAnswers``."""
        steps = "" if self.on_policy == 1 else f" in {100 * self.on_policy:g}% of the steps"
        return f"{as_count(self.answers_per_prompt, 'answer')} of its own to each prompt{steps}"

    def describe_objective(self) -> str:
        """Text on what answers train it, and by which teacher."""
        return f"{self.describe_policy()} by {self.describe_teacher()}"
