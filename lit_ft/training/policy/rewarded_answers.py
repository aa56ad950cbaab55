"""Part of a LightningModule that answers prompts and lets rewards judge the answers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lit_ft import process
from lit_ft.model.generation import GeneratedAnswer, Sampling, has_marks
from lit_ft.training.answering import AnsweringModule, AnswerOptions
from lit_ft.training.policy.rewards import Reward, SampledAnswer, rewards_of
from lit_ft.training.policy.rollouts import Asked, Rollouts, of_replicas_leader


class RewardedAnswersModule(AnsweringModule):
    """LightningModule that answers prompts of its data, and gives the answers with their rewards."""

    rewards: list[Reward]
    reward_weights: list[float]
    answers_at_once: int

    def rollouts(self, asked: Sequence[Asked], each: int, sampling: Sampling, is_computed: bool = True) -> Rollouts:
        """Answers to prompts, and their rewards; where ranks share weights, a collective.

        Args:
            asked: prompts of this rank.
            each: number of answers to each.
            sampling: choice of the tokens.
            is_computed: whether any rank computes the batch that the prompts come from; the same on all ranks.
        """
        answers: list[GeneratedAnswer] = []
        prompts = [one.prompt for one in asked for _ in range(each)]
        texts = [text for text in self.tokenizer.batch_decode([one.prompt for one in asked]) for _ in range(each)]
        if is_computed:
            seeds = [one.seed(self.trainer.global_step, answer) for one in asked for answer in range(each)]
            options = AnswerOptions(sampling, seeds, prompts, self.answers_at_once)
            with self.answering():
                answers = self.ended_answers(texts, self.max_new_tokens, options)
        sampled = self._sampled(asked, texts, answers)
        rewards = self._rewards(sampled).view(len(self.rewards), len(asked), each)
        factors = torch.tensor(self.reward_weights).view(-1, 1, 1)
        return Rollouts(asked, [one.ids for one in answers], sampled, rewards, (factors * rewards).sum(0))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Context of answers by the weights that train, in the run's precision; training modes are restored."""
        modes = {part: part.training for part in self.modules()}
        try:
            with self.trainer.precision_plugin.forward_context():
                yield
        finally:
            for part, training in modes.items():
                part.training = training

    def _sampled(
        self, asked: Sequence[Asked], texts: Sequence[str], answers: Sequence[GeneratedAnswer]
    ) -> list[SampledAnswer]:
        known = self._texts([one.expected for one in asked])
        each = len(answers) // max(len(asked), 1)
        return [
            SampledAnswer(text, one.text.strip(), known[i // each], len(one.ids), one.finish_reason)
            for i, (text, one) in enumerate(zip(texts, answers, strict=True))
        ]

    def _rewards(self, answers: Sequence[SampledAnswer]) -> Tensor:
        """Rewards of answers, ``(functions, answers)``, fp32, by the rank that leads each replica; a collective."""
        found = torch.zeros(len(self.rewards), len(answers))
        if answers and process.leads_replica(self.trainer):
            found = torch.tensor([rewards_of(reward, answers) for reward in self.rewards])
        return of_replicas_leader(self.trainer, found)

    def known_answers(self, asked: Sequence[Asked]) -> list[SampledAnswer]:
        """Answers of the data as the model would give them."""
        prompts = self.tokenizer.batch_decode([one.prompt for one in asked])
        texts = self._texts([one.expected for one in asked])
        parts = zip(prompts, texts, asked, strict=True)
        return [SampledAnswer(prompt, text, text, len(one.expected), "stop") for prompt, text, one in parts]

    def _texts(self, answers: Sequence[list[int]]) -> list[str]:
        decoded = self.tokenizer.batch_decode(answers, skip_special_tokens=not has_marks(self.tokenizer))
        return [text.strip() for text in decoded]
