"""Choice of an answer's next token, the same for answers that are generated alone and in a batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_ft.model.generation import SeededDraw

_READERS = (RepetitionPenaltyLogitsProcessor, NoRepeatNGramLogitsProcessor)
"""Steps that read the tokens before; the others do not, and a copy of a long sequence for each token takes time."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and those of the most probable ones at its place."""

    id: int
    logprob: float
    """Natural logarithm, of the model's own distribution: before temperature, penalties and truncation."""
    top: tuple[tuple[int, float], ...] = ()
    """Tokens and their log-probabilities, most probable first."""


def logprobs_of(logits: Tensor, ids: Tensor, top: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens.

    Args:
        logits: logits at each place, ``(tokens, vocabulary)``.
        ids: the tokens, ``(tokens,)``.
        top: number of most probable tokens to list for each.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, ids.to(logprobs.device)[:, None])[:, 0].tolist()
    values, tokens = (part.tolist() for part in logprobs.topk(top, -1))
    return [
        TokenLogprob(token, logprob, tuple(zip(near, at, strict=True)))
        for token, logprob, near, at in zip(ids.tolist(), own, tokens, values, strict=True)
    ]


class TokenChoice(LogitsProcessor):
    """Choice of the tokens of one answer: penalties, temperature, truncation, and draws from a generator of its own.

    transformers' continuous batching draws all answers from one generator and returns log-probabilities after the
    temperature. Here all logits but the chosen token's become minus infinity, so that its greedy choice follows.
    """

    def __init__(self, prompt: list[int], config: GenerationConfig, seed: int | None, top: int | None) -> None:
        """Prepare the choice.

        Args:
            prompt: tokens of the prompt, which penalties count too.
            config: temperature, truncation and penalties.
            seed: seed of the draws; None draws anew each time.
            top: number of most probable tokens whose log-probabilities are recorded; None records none at all.
        """
        self._ids, self._top = list(prompt), top
        self._processors = _processors(config, np.random.default_rng(seed))
        self._reads_ids = any(isinstance(step, _READERS) for step in self._processors)
        self.logprobs: list[TokenLogprob] = []
        """Log-probabilities of the chosen tokens."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the choice is the most probable token and nothing is recorded."""
        return not self._processors and self._top is None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Logits ``(1, vocabulary)`` with all but the chosen token's at minus infinity; ``input_ids`` is not read."""
        if self.changes_nothing:
            return scores
        before = torch.tensor([self._ids if self._reads_ids else []], dtype=torch.long, device=scores.device)
        chosen = self._processors(before, scores.clone()).argmax(-1)
        if self._top is not None:
            self.logprobs += logprobs_of(scores, chosen, self._top)
        self._ids += chosen.tolist()
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen[:, None], 0.0)  # type: ignore[return-value]


def _processors(config: GenerationConfig, generator: np.random.Generator) -> LogitsProcessorList:
    """The steps of ``generate`` for one config, in its order."""
    steps: list[LogitsProcessor] = []
    if config.repetition_penalty not in (None, 1.0):
        steps.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.no_repeat_ngram_size:
        steps.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.do_sample:
        if config.temperature not in (None, 1.0):
            steps.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k:
            steps.append(TopKLogitsWarper(config.top_k))
        if config.top_p is not None and config.top_p < 1:
            steps.append(TopPLogitsWarper(config.top_p))
        if config.min_p is not None:
            steps.append(MinPLogitsWarper(config.min_p))
        steps.append(SeededDraw([generator]))
    return LogitsProcessorList(steps)
