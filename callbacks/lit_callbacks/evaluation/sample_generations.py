"""Generated answers to fixed prompts during training."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lit_callbacks.evaluation.evaluation_side_effects import EvaluatedWeights, EveryNSteps, evaluating, on_all_ranks
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.output.attempts import written
from lit_callbacks.output.log_text import log_text
from lit_callbacks.output.quantities import as_count
from lit_callbacks.output.step_lines import add_lines, drop_after_step
from lit_callbacks.protocols import AnswersPrompts, Message, RendersPrompts, tokenizer_of
from lit_callbacks.run_folder import run_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Generate = Callable[[LightningModule, Sequence[str]], Sequence[str]]
"""Function from the module and prompts to one answer each; every rank calls it at once, with the same prompts."""


class SampleGenerations(Callback):
    """Generate answers to the same prompts before training, every n optimizer steps and at the end.

    Answers go to the loggers that take text, as ``samples``, and to a JSONL file (``step, prompt, answer``, and
    ``expected`` and ``chat`` where given). All ranks generate, because under sharding each holds a part of the weights;
    rank 0 writes. Dropout is off during generation, and the random numbers of training do not change. Several of these
    callbacks may share a file. A callback that replaces the weights at the end, e.g. by averages, comes before it in
    the list.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        every_n_steps: int = 500,
        max_new_tokens: int = 64,
        chat: bool = False,
        generate: Generate | None = None,
        path: str | Path | None = None,
        expected: Sequence[str] | None = None,
    ) -> None:
        """Set the prompts, the interval and the generation.

        Args:
            prompts: texts that the model continues. For the module's own ``answer``, the token that the module's
                ``tokenizer`` puts before raw text (BOS), if any, is put before a prompt that does not begin with it.
            every_n_steps: optimizer steps between two generations.
            max_new_tokens: length limit of an answer in tokens, for the module's own ``answer``.
            chat: whether each prompt is a user's turn, rendered by the module's ``render_prompt`` where it has one,
                else by the chat template of its ``tokenizer``.
            generate: function from the module and the rendered prompts to one answer each, called on every rank; None
                takes the module's method ``answer(prompts, max_new_tokens)``.
            path: JSONL file for the answers; None is ``samples.jsonl`` in ``trainer.default_root_dir``.
            expected: expected answer to each prompt, shown beside the answers in the report; None where unknown.

        Raises:
            ValueError: there is no prompt, ``expected`` has another length, or ``every_n_steps`` is not positive.
        """
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"SampleGenerations(prompts={prompts!r}): give a list of at least one text")
        if expected is not None and (isinstance(expected, str) or len(expected) != len(prompts)):
            raise ValueError(
                f"SampleGenerations(expected={expected!r}): give one answer for each of the {len(prompts)} prompts"
            )
        self.prompts, self.max_new_tokens, self.chat, self.generate = list(prompts), max_new_tokens, chat, generate
        self.expected = None if expected is None else list(expected)
        self.path = None if path is None else Path(path)
        self._every = EveryNSteps(every_n_steps)
        self._weights = EvaluatedWeights()
        self._is_off = self._is_unwritable = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate before the first step; a resumed run has done so already."""
        self._is_off = self._is_unwritable = False
        self._every.last = trainer.global_step or -1
        if self._is_first_with_file(trainer):
            self._write(trainer, lambda: drop_after_step(self._file(trainer), trainer.global_step))
        if trainer.global_step == 0:
            self._ask(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Generate every ``every_n_steps``."""
        if self._every.is_time(trainer.global_step):
            self._ask(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate after the last step, and again if the weights were replaced after it, e.g. by averages."""
        is_done = self._every.last == trainer.global_step
        if not is_done or (not self._is_off and self._weights.have_changed(trainer, pl_module)):
            self._ask(trainer, pl_module)

    def _ask(self, trainer: Trainer, module: LightningModule) -> None:
        step = trainer.global_step
        self._every.done(step)
        if self._is_off or (answers := self._answers(trainer, module)) is None or not trainer.is_global_zero:
            return
        rows = list(zip(self.prompts, answers, strict=True))
        lines = [self._line(step, number, answer) for number, answer in enumerate(answers)]
        self._write(trainer, lambda: add_lines(self._file(trainer), lines))
        if not log_text(trainer, "samples", ("prompt", "answer"), rows, step):
            names = ", ".join(type(logger).__name__ for logger in trainer.loggers)
            rank_zero_warn(f"SampleGenerations: {names} takes no text; the answers are in {self._file(trainer)}")

    def _line(self, step: int, number: int, answer: str) -> dict[str, object]:
        """Line of the file for the answer to the prompt of this number."""
        line: dict[str, object] = {"step": step, "prompt": self.prompts[number], "answer": answer}
        if self.expected is not None:
            line["expected"] = self.expected[number]
        return {**line, "chat": True} if self.chat else line

    def _answers(self, trainer: Trainer, module: LightningModule) -> list[str] | None:
        generate = self.generate
        if generate is None and isinstance(module, AnswersPrompts):
            generate = partial(_answer, self.max_new_tokens)
        if generate is None:
            self._is_off = True
            rank_zero_warn(
                f"SampleGenerations: {type(module).__name__} has no method answer(prompts, max_new_tokens), so there "
                "are no answers; give it one, or pass generate=<function from module and prompts to texts>"
            )
            return None
        with evaluating(trainer, module):
            self._weights.remember(module)
            answers = on_all_ranks(
                trainer,
                "SampleGenerations cannot generate, and stops asking",
                lambda: self._checked(generate(module, self._rendered(module))),
            )
        self._is_off = answers is None
        return answers

    def _checked(self, answers: Sequence[str]) -> list[str]:
        if isinstance(answers, str):
            raise ValueError("got one text for all prompts; return a list, with one text for each")
        answers, wanted = list(answers), len(self.prompts)
        if len(answers) != wanted or not all(isinstance(answer, str) for answer in answers):
            kinds = ", ".join(sorted({type(answer).__name__ for answer in answers}))
            raise ValueError(f"got {as_count(len(answers), 'answer')} of type {kinds}; return {wanted} of type str")
        return answers

    def _rendered(self, module: LightningModule) -> list[str]:
        tokenizer = tokenizer_of(module)
        if not self.chat:
            opening = _opening(tokenizer) if self.generate is None else ""
            return [prompt if prompt.startswith(opening) else opening + prompt for prompt in self.prompts]
        turns: list[list[Message]] = [[{"role": "user", "content": prompt}] for prompt in self.prompts]
        if isinstance(module, RendersPrompts):
            return [module.render_prompt(turn) for turn in turns]
        if tokenizer is None:
            raise ValueError(f"{type(module).__name__} has no tokenizer with a chat template; set chat=False")
        return [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]

    def _write(self, trainer: Trainer, write: Callable[[], object]) -> None:
        if trainer.is_global_zero and not self._is_unwritable:
            what = f"SampleGenerations cannot write {str(self._file(trainer))!r}; give path="
            self._is_unwritable = not written(what, write)

    def _is_first_with_file(self, trainer: Trainer) -> bool:
        """Whether no callback before this one has written to the same file in this fit."""
        others = (one for one in attributes_of(trainer).callbacks if isinstance(one, SampleGenerations))
        return next((one for one in others if one._file(trainer) == self._file(trainer)), self) is self

    def _file(self, trainer: Trainer) -> Path:
        return self.path or run_folder(trainer) / "samples.jsonl"


def _opening(tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Token that a tokenizer puts before raw text, or ""; ``answer`` takes prompts with special tokens spelled out.

    A tokenizer of another library than transformers may have no such token, or return something else.
    """
    if not callable(tokenizer) or getattr(tokenizer, "bos_token", None) is None:
        return ""
    encoded = tokenizer("")
    ids = encoded.get("input_ids", []) if isinstance(encoded, Mapping) else []
    return str(tokenizer.bos_token) if ids and ids[0] == tokenizer.bos_token_id else ""


def _answer(max_new_tokens: int, module: AnswersPrompts, prompts: Sequence[str]) -> Sequence[str]:
    return module.answer(prompts, max_new_tokens)
