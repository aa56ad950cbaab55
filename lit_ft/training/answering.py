"""Generation of answers, and the loss of plain texts, for callbacks and ``predict``."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import move_data_to_device
from lit_callbacks.protocols import Message
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.errors import RecipeError
from lit_ft.model.generation import GREEDY, GeneratedAnswer, Sampling, generate_answers
from lit_ft.model.render_limits import render_chat
from lit_ft.packed_batch import pack_samples
from lit_ft.protocols import Answer, FinishReason, Question
from lit_ft.training.loss.packed_forward import base_model_of


class AnsweringModule(LightningModule):
    """LightningModule that answers prompts with its causal LM."""

    model: PreTrainedModel | PeftModel | None
    max_new_tokens: int
    sampling: Sampling = GREEDY
    """Choice of the tokens of ``predict_step``; ``answer`` is greedy."""
    _answered_rows: Sequence[int] | None = None
    _ends: Sequence[FinishReason] = ()
    """What ended each answer of the last call of ``answer``."""

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model, with the tokens that the recipe adds."""

    @property
    def base_model(self) -> PreTrainedModel:
        """Hugging Face model inside PEFT's wrapper."""
        if self.model is None:
            raise RecipeError("the model has no weights yet: a Trainer reads them, or model.configure_model()")
        return base_model_of(self.model)

    def answer(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        """Greedy answers to rendered prompts, whatever the base's generation_config says of sampling and penalties.

        An answer ends at the base's end tokens, the tokenizer's, and those that close a turn in its chat template.
        Where weights are split over ranks, every rank must call it equally often, some with no prompts if need be.
        """
        chosen = GREEDY if self._answered_rows is None else self.sampling
        model, base = self.model, self.base_model
        answers = generate_answers(
            model, base, self.tokenizer, prompts, max_new_tokens, chosen, self._answered_rows or None
        )
        self._ends = [answer.finish_reason for answer in answers if answer.finish_reason is not None]
        return [answer.text for answer in answers]

    def ended_answers(self, prompts: Sequence[str], max_new_tokens: int) -> list[GeneratedAnswer]:
        """``answer``, with what ended each answer; not its result, for strategies and other modules give texts."""
        self._ends = ()
        texts = self.answer(prompts, max_new_tokens)
        return [GeneratedAnswer(*pair) for pair in zip(texts, self._ends or [None] * len(texts), strict=True)]

    def render_prompt(self, messages: list[Message]) -> str:
        """A prompt for ``answer`` from the turns of a conversation, by the chat template.

        Raises:
            RecipeError: the template takes more time or memory than one conversation may.
        """
        return render_chat(self.tokenizer, messages, generation=True)

    def text_loss(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        """Summed cross-entropy of plain texts in nats, and their number of predicted tokens."""
        encoded = [np.array(self.tokenizer(text)["input_ids"]) for text in texts]
        # One pass for any number of texts: ranks with shards of the weights wait for each other in each.
        batch = move_data_to_device(pack_samples([(ids, ids) for ids in encoded]), self.device)
        return self(batch).per_token.sum(), len(batch["targets"])

    def predict_step(self, batch: Sequence[Question], batch_idx: int) -> list[Answer]:
        """Answer the questions of a batch, as ``sampling`` says."""
        if not all(isinstance(question, Mapping) and {"row", "prompt"} <= question.keys() for question in batch):
            raise RecipeError(
                "predict takes batches of questions, lists of mappings with row and prompt, as TextDataModule gives "
                "them; answers to texts of your own are those of model.answer(prompts, max_new_tokens=256)"
            )
        # Not arguments of `answer`: strategies wrap it, and other modules have it with these two alone.
        self._answered_rows = [question["row"] for question in batch]
        try:
            answers = self.ended_answers([question["prompt"] for question in batch], self.max_new_tokens)
        finally:
            self._answered_rows = None
        pairs = zip(batch, answers, strict=True)
        return [{**question, "answer": one.text, "finish_reason": one.finish_reason} for question, one in pairs]
