"""Generation of answers, and the loss of plain texts, for callbacks and ``predict``."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

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
from lit_ft.protocols import Answer, Question
from lit_ft.training.loss.packed_forward import base_model_of


class AnswerOptions(NamedTuple):
    """What a call of ``answer`` asks for beyond its arguments: strategies wrap it, and other modules have it too."""

    sampling: Sampling = GREEDY
    rows: Sequence[int] | None = None
    """Numbers that seed the random draws of the answers; None counts the prompts."""
    prompts: Sequence[list[int]] | None = None
    """Tokens of the prompts, in place of those of their texts."""
    at_once: int | None = None
    """Largest number of prompts that are answered together; None sets no limit."""


DEFAULT_OPTIONS = AnswerOptions()


class AnsweringModule(LightningModule):
    """LightningModule that answers prompts with its causal LM."""

    model: PreTrainedModel | PeftModel | None
    max_new_tokens: int
    sampling: Sampling = GREEDY
    """Choice of the tokens of ``predict_step``; ``answer`` is greedy."""
    _options = DEFAULT_OPTIONS
    _answers: Sequence[GeneratedAnswer] = ()
    """Those of the last call of ``answer``."""

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model, with the tokens that the recipe adds."""

    def describe_training(self) -> str:
        """Text on whose answers train it, and by what; see ``DescribesTraining``."""
        return "the answers of the data"

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
        sampling, rows, ids, at_once = self._options
        asked, base, model = prompts if ids is None else ids, self.base_model, self.model
        assert model is not None, "base_model has refused it"
        chosen = sampling, rows or None, at_once
        self._answers = generate_answers(model, base, self.tokenizer, asked, max_new_tokens, *chosen)
        return [answer.text for answer in self._answers]

    def ended_answers(
        self, prompts: Sequence[str], max_new_tokens: int, options: AnswerOptions = DEFAULT_OPTIONS
    ) -> list[GeneratedAnswer]:
        """``answer``, with what ended each answer; not its result, for strategies and other modules give texts."""
        self._options, self._answers = options, ()
        try:
            texts = self.answer(prompts, max_new_tokens)
        finally:
            self._options = DEFAULT_OPTIONS
        is_known = len(self._answers) == len(texts)
        return list(self._answers) if is_known else [GeneratedAnswer(text, None) for text in texts]

    @contextmanager
    def apart_from_training(self) -> Iterator[None]:
        """Context of further passes of a training step, in the run's precision; training modes are restored."""
        modes = {part: part.training for part in self.modules()}
        try:
            with self.trainer.precision_plugin.forward_context():
                yield
        finally:
            for part, training in modes.items():
                part.training = training

    def render_prompt(self, messages: list[Message]) -> str:
        """A prompt for ``answer`` from the turns of a conversation, by the chat template.

        Raises:
            RecipeError: the template takes more time or memory than one conversation may.
        """
        return render_chat(self.tokenizer, messages, generation=True)

    def text_loss(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        """Summed cross-entropy of plain texts in nats, and their number of predicted tokens.

        Raises:
            RecipeError: a text has no token.
        """
        encoded = [np.array(self.tokenizer(text)["input_ids"]) for text in texts]
        if empty := [text for text, ids in zip(texts, encoded, strict=True) if not len(ids)]:
            raise RecipeError(f"the text {empty[0]!r} has no token, so that it has no loss; leave it out")
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
        options = AnswerOptions(self.sampling, [question["row"] for question in batch])
        answers = self.ended_answers([question["prompt"] for question in batch], self.max_new_tokens, options)
        pairs = zip(batch, answers, strict=True)
        return [{**question, "answer": one.text, "finish_reason": one.finish_reason} for question, one in pairs]
