"""Loss, exact match, ROUGE and BLEU on a data set, by the code of ``validate`` and ``AnswerScores``."""

import math
from dataclasses import asdict

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from lit_ft.data.option_checks import DEFAULT_SHUFFLE_BUFFER
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.export import restore_run
from lit_ft.inference.opening import OpenedModel
from lit_ft.internals.peft import virtual_tokens_of
from lit_ft.model import loading
from lit_ft.model.config.positions import has_rotary_positions, positions_in
from lit_ft.recipe.trainer_checks import quiet_trainer
from lit_ft.run.folder import RunFolder
from lit_ft.scoring.scores import Score
from lit_ft.training.answer_scores.exact_match import answer_rows
from lit_ft.training.answer_scores.rouge_and_bleu import rouge_and_bleu
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.loss.packed_forward import PackedForward
from lit_ft.training.spec import prepare_for_packed_batches
from lit_ft.tuning.spec import TuningSpec


class OpenedModule(CausalLM):
    """LightningModule around a model that is opened already."""

    def __init__(self, opened: OpenedModel) -> None:
        super().__init__(opened.pretrained)
        self.opened = opened
        _prepare(opened)
        self.model, self._packed = opened.model, PackedForward(opened.model)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the opened model."""
        return self.opened.tokenizer

    def check_length(self, what: str, length: int | None) -> None:
        """Warn of samples beyond the positions, which a model that computes them can be asked for; else refuse them."""
        limit, virtual = positions_in(self.opened.base.config), virtual_tokens_of(self.opened.model)
        if length is None or limit is None or length <= (limit := limit - virtual):
            return
        left = f" that {virtual} virtual tokens leave" if virtual else ""
        said = f"{what} of {length:,} tokens is beyond the {limit:,} positions of {self.opened.name}{left}"
        if not has_rotary_positions(self.opened.base.config):
            raise RecipeError(f"{said}; set --data.max_length={limit}")
        rank_zero_warn(f"losses are measured all the same: {said}; limit them with --data.max_length={limit}")


def _prepare(opened: OpenedModel) -> None:
    peft = opened.model.peft_config["default"] if isinstance(opened.model, PeftModel) else None
    requested = "auto" if opened.untrained is None else opened.untrained.attn_implementation
    attention = TuningSpec(peft, "auto", None).attention(requested)
    opened.base.set_attn_implementation(loading.pick_attention(opened.base.config, attention))
    if opened.untrained is None:  # a run's model is prepared already
        prepare_for_packed_batches(opened.base)


def data_of(path: str, model: str, data: dict[str, object]) -> TextDataModule:
    """Data module that reads ``data``, with the options of a run's data otherwise.

    Args:
        path: what is evaluated; a run's folder gives the options.
        model: what is asked; a run's folder gives the chat template.
        data: options of the data in place of the run's; ``test_path`` is the data set.

    Raises:
        RecipeError: the run's data is of another class, or an option is wrong.
    """
    class_path, options = _data_options_of(path)
    if model != path:
        options |= dict.fromkeys(_OF_THE_MODEL)
        options |= {name: value for name, value in _data_options_of(model)[1].items() if name in _OF_THE_MODEL}
    without_training = dict.fromkeys(("path", "sources", "val_path", "val_sources"))
    options |= {**without_training, "val_fraction": 0.0, "mixing": "concatenate"}
    options |= {"streaming": False, "shuffle_buffer": DEFAULT_SHUFFLE_BUFFER, **data}
    return restore_run.data_of({"class_path": class_path, "init_args": options}, "evaluate")


_OF_THE_MODEL = ("chat_template", "template_options")
"""Options of the data that go with a model, not with the rows."""


def _data_options_of(path: str) -> tuple[str, dict[str, object]]:
    """Class of a run's data and its options; the default where ``path`` is no run."""
    run, default = RunFolder.at(path), "lit_ft.TextDataModule"
    if not run.config.is_file():
        return default, {}
    data = run.recipe()["data"]
    return data.get("class_path", default), dict(data.get("init_args", {}))


def held_out_scores(
    opened: OpenedModel, data: TextDataModule, name: str, precision: str | None, max_new_tokens: int, batch_size: int
) -> tuple[list[Score], list[dict[str, str]]]:
    """Loss, token accuracy, exact match, ROUGE and BLEU on the test data of a data module, and the answers.

    Args:
        opened: model, with its adapter or without.
        data: data module.
        name: name of the data set in the scores.
        precision: precision of the run, of which mixed ones are used here.
        max_new_tokens: largest number of tokens of an answer.
        batch_size: answers that are generated together.
    """
    module, device = OpenedModule(opened), opened.base.device
    trainer = quiet_trainer(
        accelerator="cpu" if device.type == "cpu" else "auto",
        devices=1,
        precision=precision if precision is not None and precision.endswith("-mixed") else None,
    )
    (metrics,) = trainer.test(module, datamodule=data, verbose=False)
    if opened.base.device != device:  # Lightning leaves a module on the CPU
        module.to(device)
    scores = [Score(name, metric, metrics[f"test/{metric}"]) for metric in ("loss", "perplexity", "token_accuracy")]
    prompts = data.splits.prompts("test")
    scored = answer_rows(module, prompts, range(len(prompts)), max_new_tokens, batch_size, len(prompts))
    answers = list(scored.values())
    if not answers:  # raw text has no questions
        return scores, []
    share = sum(one.is_right for one in answers) / len(answers)
    error = math.sqrt(share * (1 - share) / (len(answers) - 1)) if len(answers) > 1 else None
    names = ("question", "expected", "answer", "finish_reason")
    rows = [{name: value for name, value in asdict(one).items() if name in names} for one in answers]
    overlap = rouge_and_bleu([one.answer for one in answers], [one.expected for one in answers])
    scores += [Score(name, "exact_match", share, error), *(Score(name, *score) for score in overlap.items())]
    return scores, rows
