"""Part of a LightningModule that answers prompts of its data, and trains on the answers."""

from collections.abc import Sequence
from typing import cast

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lit_callbacks import LossLedger
from lit_callbacks.phases import within_a_step
from torch import Tensor

from lit_ft import process
from lit_ft.errors import RecipeError
from lit_ft.internals.lightning import is_at_start_of_step
from lit_ft.model.generation import GeneratedAnswer, Sampling, has_marks
from lit_ft.packed_batch import PackedBatch
from lit_ft.process import datamodule_of
from lit_ft.protocols import FinishReason, GivesKnownAnswers, RowNeeds
from lit_ft.training.answering import AnsweringModule, AnswerOptions
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.policy.answers_file import AnswersFile
from lit_ft.training.policy.rewards import Reward, SampledAnswer, rewards_of
from lit_ft.training.policy.rollouts import Asked, Rollouts, asked_in_window, asked_of, of_replicas_leader


class SampledAnswersModule(AnsweringModule):
    """LightningModule that answers prompts of its data, lets rewards judge the answers, and trains on them."""

    rewards: Sequence[Reward] = ()
    reward_weights: Sequence[float] = ()
    answers_at_once: int
    trains_on_data: bool = False
    """Whether some steps train on the answers of the data."""
    measured_of_own: str
    """A metric of validation for which no known answer is needed, and its mode."""
    _file: AnswersFile
    _of_step: Rollouts | None = None
    """Answers to all prompts of the step on this rank; None before the first micro-batch of a fit."""

    def setup(self, stage: str) -> None:
        """Refuse callbacks that wait for losses of samples, or of known answers, where there are none.

        Raises:
            RecipeError: there is one.
        """
        super().setup(stage)
        callbacks = cast(Sequence[Callback], self.trainer.callbacks)  # type: ignore[attr-defined]
        has_ledger = any(isinstance(callback, LossLedger) for callback in callbacks)
        if stage == "fit" and has_ledger and not self.trains_on_data:
            raise RecipeError(
                f"trainer.callbacks: LossLedger keeps the loss of each sample of the data, and {type(self).__name__} "
                "trains on answers of its own; leave LossLedger out"
            )
        if stage == "fit" and not self.has_known_answers("val"):
            self._check_monitors(callbacks)

    def _check_monitors(self, callbacks: Sequence[Callback]) -> None:
        of_known = [f"val/{name}" for name in ("loss", *CausalLM.measured)]
        for callback in callbacks:
            if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor in of_known:
                raise RecipeError(
                    f"trainer.callbacks: {type(callback).__name__} monitors {callback.monitor}, and no row of the "
                    f"validation data has a known answer to measure it; monitor {self.measured_of_own}, or give answers"
                )

    def has_known_answers(self, split: str) -> bool:
        """Whether any sample of a split (val, test) has a known answer."""
        data = datamodule_of(self.trainer)
        return not isinstance(data, GivesKnownAnswers) or data.has_known_answers(split)

    @property
    def row_needs(self) -> RowNeeds:
        """What rewards read of the rows of the data; see ``SamplesAnswers``."""
        columns = {column: reward.name for reward in self.rewards for column in reward.columns}
        messages = next((reward.name for reward in self.rewards if reward.reads_messages), None)
        reads_none = bool(self.rewards) and not any(reward.reads_expected for reward in self.rewards)
        return RowNeeds(columns, messages, may_lack_answers=reads_none)

    def on_train_start(self) -> None:
        """Begin the file of answers."""
        super().on_train_start()
        self._file.begin(self.trainer)
        self._of_step = None

    def rollouts_in_step(self, batch: PackedBatch, each: int) -> tuple[Rollouts, Rollouts]:
        """Drawn answers to the prompts of a batch, and those to all prompts of its optimizer step on this rank.

        All answers of a step are generated at its first micro-batch.

        Args:
            batch: packed batch of the data, in training.
            each: number of answers to each prompt.
        """
        asked, sampling = asked_of(batch), Sampling(temperature=1.0, seed=process.seed())
        if "window_tokens" not in batch:  # a loader that shows no more than this batch
            with within_a_step(self.trainer, self, "generation"):
                alone = self.rollouts(asked, each, sampling, bool(batch["segment_lengths"]))
            return alone, alone
        if self._of_step is None or is_at_start_of_step(self.trainer):
            with within_a_step(self.trainer, self, "generation"):
                self._of_step = self.rollouts(asked_in_window(batch), each, sampling)
        return self._of_step.take(asked), self._of_step

    def rollouts(self, asked: Sequence[Asked], each: int, sampling: Sampling, is_computed: bool = True) -> Rollouts:
        """Answers to prompts, and their rewards; where ranks share weights, a collective.

        Args:
            asked: prompts of this rank.
            each: number of answers to each.
            sampling: choice of the tokens.
            is_computed: whether any rank computes the batch that the prompts come from; the same on all ranks.

        Raises:
            RecipeError: an own ``answer`` gives texts without their tokens, which cannot be trained on.
        """
        answers: list[GeneratedAnswer] = []
        prompts = [one.prompt for one in asked for _ in range(each)]
        texts = [text for text in self.tokenizer.batch_decode([one.prompt for one in asked]) for _ in range(each)]
        if is_computed:
            seeds = [one.seed(self.trainer.global_step, answer) for one in asked for answer in range(each)]
            options = AnswerOptions(sampling, seeds, prompts, self.answers_at_once)
            with self.apart_from_training():
                answers = self.ended_answers(texts, self.max_new_tokens, options)
        if any(one.finish_reason is None for one in answers):
            raise RecipeError(
                f"{type(self).__name__} trains on the tokens of its answers, and its own `answer` gives texts alone; "
                "let it return what super().answer(prompts, max_new_tokens) gives"
            )
        sampled = self._sampled(asked, texts, answers)
        rewards = self._rewards(sampled).view(len(self.rewards), len(asked), each)
        factors = torch.tensor(self.reward_weights).view(-1, 1, 1)
        return Rollouts(asked, [one.ids for one in answers], sampled, rewards, (factors * rewards).sum(0))

    def _sampled(
        self, asked: Sequence[Asked], texts: Sequence[str], answers: Sequence[GeneratedAnswer]
    ) -> list[SampledAnswer]:
        known = self._texts([one.expected for one in asked])
        each = len(answers) // max(len(asked), 1)
        return [
            _seen(asked[i // each], text, one.text.strip(), known[i // each], len(one.ids), one.finish_reason)
            for i, (text, one) in enumerate(zip(texts, answers, strict=True))
        ]

    def _rewards(self, answers: Sequence[SampledAnswer]) -> Tensor:
        """Rewards of answers, ``(functions, answers)``, fp32, by the rank that leads each replica; a collective."""
        found = torch.zeros(len(self.rewards), len(answers))
        if not self.rewards:
            return found
        if answers and process.leads_replica(self.trainer):
            found = torch.tensor([rewards_of(reward, answers) for reward in self.rewards])
        return of_replicas_leader(self.trainer, found)

    def known_answers(self, asked: Sequence[Asked]) -> list[SampledAnswer]:
        """Answers of the data as the model would give them; empty ones where it has none."""
        prompts = self.tokenizer.batch_decode([one.prompt for one in asked])
        texts = self._texts([one.expected for one in asked])
        parts = zip(prompts, texts, asked, strict=True)
        return [
            _seen(one, prompt, text if one.row.has_answer else "", text, len(one.expected), "stop")
            for prompt, text, one in parts
        ]

    def _texts(self, answers: Sequence[list[int]]) -> list[str]:
        decoded = self.tokenizer.batch_decode(answers, skip_special_tokens=not has_marks(self.tokenizer))
        return [text.strip() for text in decoded]


def _seen(
    asked: Asked, prompt: str, answer: str, known: str, tokens: int, finish_reason: FinishReason | None
) -> SampledAnswer:
    """An answer as rewards see it."""
    row = asked.row
    expected = known if row.has_answer else ""
    return SampledAnswer(prompt, answer, expected, tokens, finish_reason, row.columns, row.messages, row.tools)
