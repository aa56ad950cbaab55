"""The LightningModule that trains a reward model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks import ForgettingProbe, SampleGenerations
from lit_callbacks.distributed.host_copy import queued_copy
from lit_callbacks.internals.lightning_internals import attributes_of
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedTokenizerBase

from lit_ft.errors import RecipeError, check_types
from lit_ft.model.render_limits import render_chat
from lit_ft.packed_batch import PackedBatch
from lit_ft.training.answer_scores.exact_match import ExactMatch
from lit_ft.training.preference.objectives import AnswerLogProbs, Objective
from lit_ft.training.preference.preference_lm import PreferenceLM
from lit_ft.tuning.lora_init import init_of

_ASKING = (ExactMatch, ForgettingProbe, SampleGenerations)
"""Callbacks that ask a causal language model for answers, or for the loss of texts."""


class BradleyTerry(Objective):
    """The better answer of a pair is the more probable winner (Bradley and Terry 1952; Ouyang et al. 2022, eq. 1).

    A reward takes the place of an answer's log-probability.
    """

    needs_reference = False

    def __init__(self, center_weight: float = 0.0) -> None:
        """Set the loss; ``center_weight`` is that of ``RewardLM``."""
        if not 0 <= center_weight < math.inf:
            raise RecipeError(f"model.center_weight={center_weight} must be 0 or above, and finite")
        self.center_weight = center_weight

    def losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        """Loss of each pair, ``(P,)``."""
        losses = -logsigmoid(chosen.policy - rejected.policy)
        return losses + self.center_weight * (chosen.policy + rejected.policy) ** 2 if self.center_weight else losses

    def reward(self, answer: AnswerLogProbs) -> Tensor:
        """Score of each answer, ``(P,)``."""
        return answer.policy


class RewardLM(PreferenceLM):
    """Train a reward model on pairs of a better and a worse answer: a score in place of the logits of tokens.

    It takes data of the format ``preference``. A conversation is rendered as a whole by the chat template, and its
    score is a linear layer (``score``) of its last token's final hidden state, as transformers'
    ``AutoModelForSequenceClassification`` computes it. The loss is ``-log s(r_c - r_r)``, s the logistic function, and
    its mean is over the pairs of the whole optimizer step.

    Logged: ``{train,val,test}/{loss,reward_accuracy,reward_margin,reward_chosen,reward_rejected}``, means over pairs.
    """

    measured: Sequence[str] = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")
    option = "model.center_weight"

    def __init__(self, pretrained: str, center_weight: float = 0.0, **kwargs: Any) -> None:
        """Say what is trained and how.

        Args:
            pretrained: base model, a Hugging Face hub id or a folder; of a causal language model, which gets a new head
                with one output, or of a reward model, which is trained further.
            center_weight: weight of the squared sum of both rewards, by which rewards stay around 0, e.g. 0.01
                (Eisenstein et al. 2023, arXiv:2312.09244); 0 leaves it out.
            **kwargs: the other options of ``CausalLM``.
        """
        check_types("model", RewardLM.__init__, {"center_weight": center_weight})
        super().__init__(pretrained, objective=BradleyTerry(center_weight), **kwargs)
        if init_of(self.spec.tuning.peft) == "lora_ga":
            raise RecipeError(
                "model.peft: init_lora_weights='lora_ga' looks at gradients of the tokens of answers, and a reward "
                "model has one score of a text; take another init"
            )
        self.spec = replace(self.spec, base=replace(self.spec.base, head="score"))

    def _with_reference(self, batch: PackedBatch | Mapping[str, Tensor], split: str) -> PackedBatch:
        return at_ends(super()._with_reference(batch, split))

    def configure_model(self) -> None:
        """Build the model; its config gets a padding token, unless that is the token which texts end with."""
        super().configure_model()
        config, padding = self.base_model.config.get_text_config(), self.tokenizer.pad_token_id
        padding = padding if config.pad_token_id is None else config.pad_token_id
        if padding is not None and padding == _last_token(self.tokenizer):
            token = self.tokenizer.convert_ids_to_tokens(padding)
            rank_zero_info(
                f"the padding token {token!r} also ends texts. transformers takes the score of the token before the "
                "padding, so the config of the reward model gets no padding token, and transformers scores one text at "
                "a time"
            )
            padding = None
        config.pad_token_id = padding

    def check_data(self, data: object, stage: str) -> None:
        """Refuse data that is no pairs, and what asks for answers; see ``ChecksData``."""
        super().check_data(data, stage)
        callbacks = [] if self._trainer is None else attributes_of(self._trainer).callbacks
        asking = [type(one).__name__ for one in callbacks if isinstance(one, _ASKING)]
        if stage == "predict" or asking:
            where = "predict" if stage == "predict" else f"trainer.callbacks: {', '.join(asking)}"
            without = "" if stage == "predict" else "leave them out; "
            raise RecipeError(
                f"{where}: a reward model scores texts, and writes none; {without}for scores of answers run export RUN "
                "--merge, and give RUN/merged to lit_ft.RewardModel (docs/preferences.md)"
            )


def _last_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of the last token of a text: of a rendered conversation, or of what closes raw text."""
    if not tokenizer.chat_template:
        return tokenizer.eos_token_id
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return int(tokenizer(render_chat(tokenizer, turns), add_special_tokens=False)["input_ids"][-1])


def at_ends(batch: PackedBatch) -> PackedBatch:
    """A batch of P pairs with the last token of each of the 2P conversations as what predicts; targets mean nothing."""
    if not len(batch.get("pairs", ())):
        return batch
    ends = torch.tensor(batch["segment_lengths"]).cumsum(0) - 1
    nothing = batch["targets"].new_zeros(len(ends))
    predicts = PackedBatch(
        predict_at=queued_copy(ends, nothing.device),
        targets=nothing,
        target_answers=torch.arange(len(ends), device=nothing.device),
        target_sources=nothing,
    )
    return {**batch, **predicts}
