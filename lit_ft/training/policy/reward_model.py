"""A reward model: a sequence classifier of Hugging Face with one label, which says how good an answer is."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.protocols import HasScore, Message
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.errors import RecipeError, check_counts, check_types, first_line, option_called
from lit_ft.model import loading
from lit_ft.model.config.positions import check_positions
from lit_ft.model.render_limits import render_chat
from lit_ft.training.policy.rewards import Reward, SampledAnswer

_OPTION = "model.rewards: RewardModel.pretrained"


class RewardModel(Reward):
    """Score of a trained reward model, which reads the conversation and the answer by its own chat template.

    It is frozen, in no checkpoint, and whole on each device that computes rewards: of ranks that share a model, one.
    """

    reads_messages, reads_expected, uses_device = True, False, True

    def __init__(self, pretrained: str, dtype: loading.Dtype = "auto", answers_at_once: int = 16) -> None:
        """Say which model.

        Args:
            pretrained: folder or hub id of a sequence classifier with one label, and its tokenizer.
            dtype: of its weights; auto is what its config says.
            answers_at_once: largest number of answers that are scored together.
        """
        check_types("model.rewards", RewardModel.__init__, locals())
        check_counts("model.rewards", answers_at_once=answers_at_once)
        self.pretrained, self.dtype, self.answers_at_once = pretrained, dtype, answers_at_once

    def check(self) -> None:
        """Find what is wrong with config or tokenizer; see ``Reward``."""
        if self._config.num_labels != 1:
            raise RecipeError(
                f"{_OPTION}={self.pretrained!r} has {self._config.num_labels} labels, and a reward model has one; name "
                "a sequence classifier that was trained as one"
            )
        if self._tokenizer.chat_template is None:
            raise RecipeError(
                f"{_OPTION}={self.pretrained!r} has a tokenizer without a chat template, by which it would read "
                "conversations; put chat_template.jinja into its folder"
            )

    @cached_property
    def _config(self) -> PretrainedConfig:
        with option_called("model.pretrained", _OPTION):
            return loading.load_config(self.pretrained)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        with option_called("model.pretrained", _OPTION):
            return loading.load_tokenizer(self.pretrained)

    @cached_property
    @torch.inference_mode(False)
    def _model(self) -> PreTrainedModel:
        dtype = loading.dtype_of_weights(self._config, self.dtype)
        try:
            with torch.random.fork_rng(devices=[]):
                model, report = AutoModelForSequenceClassification.from_pretrained(
                    self.pretrained, config=self._config, dtype=dtype, output_loading_info=True, trust_remote_code=False
                )
        except loading.WEIGHT_ERRORS as error:
            raise RecipeError(
                f"{_OPTION}={self.pretrained!r} has no weights that load ({first_line(error)}); name another one"
            ) from error
        if missing := sorted(report["missing_keys"]):
            raise RecipeError(
                f"{_OPTION}={self.pretrained!r} lacks weights, which would be random ({', '.join(missing[:3])}); name "
                "a trained reward model"
            )
        count = sum(parameter.numel() for parameter in model.parameters())
        rank_zero_info(f"reward model: {self.pretrained}, {count:,} parameters in {dtype}".replace("torch.", ""))
        return model.requires_grad_(False).eval()

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        """Score of each answer.

        Raises:
            RecipeError: a conversation with its answer has more tokens than the model has positions.
        """
        return self._of_texts([self._text(self._turns(one), one.tools) for one in answers])

    def scores(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Sequence[float]:
        """Score of each conversation, which ends with the answer.

        Args:
            conversations: turns of each, with role and content.
            tools: JSON schemas of the functions that may be called in all of them.

        Raises:
            RecipeError: as ``check`` and ``of``.
        """
        self.check()
        return self._of_texts([self._text(list(turns), tools) for turns in conversations])

    def _text(self, turns: list[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        return render_chat(self._tokenizer, turns, tools=tools)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _of_texts(self, texts: Sequence[str]) -> Sequence[float]:
        ids = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        longest, fix = max(map(len, ids), default=0), "set model.max_new_tokens or data.max_length lower"
        name = f"the reward model {self.pretrained!r}"
        check_positions(self._config, longest, "a conversation with its answer", name, fix, is_fixed=True)
        in_order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        scores = torch.zeros(len(ids))
        with torch.autocast(self.device.type, enabled=False):
            for start in range(0, len(ids), self.answers_at_once):
                chosen = in_order[start : start + self.answers_at_once]
                scores[chosen] = self._scores([ids[i] for i in chosen])
        return scores.tolist()

    @staticmethod
    def _turns(one: SampledAnswer) -> list[Message]:
        return [*map(dict, one.messages), {"role": "assistant", "content": one.answer}]

    def _scores(self, ids: Sequence[list[int]]) -> torch.Tensor:
        """Scores of some sequences, fp32 on the CPU: of the last token of each, which padding comes after."""
        lengths = torch.tensor([len(one) for one in ids])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in ids], batch_first=True)
        mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
        model = self._model.to(self.device)
        given = {"input_ids": padded.to(self.device), "attention_mask": mask.long().to(self.device)}
        hidden = loading.decoder_of(model)(**given, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(ids)), (lengths - 1).to(self.device)]
        if not isinstance(model, HasScore):
            raise RecipeError(
                f"{_OPTION}={self.pretrained!r} is a {type(model).__name__}, no decoder with a layer `score`; name "
                "another one"
            )
        return model.score(last)[:, 0].float().cpu()
