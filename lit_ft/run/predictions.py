"""The file of answers that ``predict`` writes: one line of JSON per row; nothing is overwritten, and none is lost."""

import glob
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lit_callbacks.durable_writes import write_durably
from lit_callbacks.output.quantities import as_count
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lit_ft.errors import RecipeError
from lit_ft.model.config.positions import check_positions, has_rotary_positions, positions_in
from lit_ft.protocols import Question
from lit_ft.training.answering import AnsweringModule


def free_path(folder: Path, out: str | None) -> Path:
    """Path of the file to write: ``out``, else ``predictions.jsonl`` in a folder, numbered if that exists.

    Args:
        folder: folder of the run.
        out: path that the user gives; None for none.

    Raises:
        RecipeError: ``out`` exists, or its folder cannot be written.
    """
    if out is None:
        names = (f"predictions{'' if number == 1 else f'-{number}'}.jsonl" for number in count(1))
        return next(path for name in names if not _taken(path := folder / name))
    path = Path(out).expanduser()
    if taken := _taken(path):
        raise RecipeError(f"out={out!r}: {taken} exists, and is not overwritten; name another file, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
        path.unlink()
    except OSError as error:
        raise RecipeError(f"out={out!r} cannot be written ({error.strerror}); name another file") from error
    return path


def check_prompts(
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    max_new_tokens: int,
    name: str,
    virtual_tokens: int = 0,
) -> None:
    """Count prompts beyond the positions of a model, and those that leave too few of them for an answer.

    Args:
        config: config of the model.
        max_new_tokens: longest answer, in tokens.
        name: the model, for messages.
        virtual_tokens: tokens of a tuning method that come before each prompt.

    Raises:
        RecipeError: a prompt has more tokens than the model has positions, and they are learned.
    """
    limit = positions_in(config)
    if limit is None or not questions:
        return
    limit -= virtual_tokens
    lengths: list[int] = []
    for start in range(0, len(questions), 1000):  # not the tokens of all prompts at once
        prompts = [question["prompt"] for question in questions[start : start + 1000]]
        lengths += map(len, tokenizer(prompts, add_special_tokens=False, verbose=False)["input_ids"])
    longest = lengths.index(max(lengths))
    try:
        check_positions(
            config,
            lengths[longest],
            f"the prompt of {questions[longest]['id']}",
            name,
            "leave the row out",
            virtual_tokens,
        )
    except RecipeError as error:
        if not has_rotary_positions(config):
            raise
        beyond = sum(length > limit for length in lengths)
        rank_zero_warn(f"{beyond:,} of {as_count(len(lengths), 'prompt')} too long: {error}")
    if late := sum(length <= limit < length + max_new_tokens for length in lengths):
        rank_zero_info(
            f"{late:,} of {as_count(len(lengths), 'prompt')} leave less than max_new_tokens={max_new_tokens} of the "
            f"{limit:,} positions of {name}"
        )


def _taken(path: Path) -> Path | None:
    """The file itself, or answers of a ``predict`` into it that did not reach its end; None if there is neither."""
    if path.exists() or path.is_symlink():
        return path
    return next(path.parent.glob(_partial_path(Path(glob.escape(path.name)), "*").name), None)


def gather(answers: list[Any]) -> list[Any]:
    """Answers of all ranks in the order of the rows, each once, on rank 0; other ranks get none. A collective."""
    parts: list[list[Any]] = [answers]
    if dist.is_initialized() and dist.get_world_size() > 1:
        is_first = dist.get_rank() == 0
        parts = [[]] * dist.get_world_size()
        dist.gather_object(answers, parts if is_first else None, dst=0)
        if not is_first:
            return []
    together = [answer for part in parts for answer in part]
    if not all(isinstance(answer, dict) and "row" in answer for answer in together):
        return together  # of another module than CausalLM
    by_row = {answer["row"]: answer for answer in together}
    return [{key: value for key, value in by_row[row].items() if key != "row"} for row in sorted(by_row)]


class AnswerFile(Callback):
    """File of the answers of ``predict``, and until then one of each rank that grows with its batches.

    What a stopped run has answered stays in these; their lines have the number of the row, as ranks take rows in turn.
    """

    def __init__(self, path: Path | None) -> None:
        """Set the file.

        Args:
            path: new file for the answers of all ranks; rank 0's counts.
        """
        self._path = path
        self._partial: Path | None = None
        self._is_behind = False
        """Whether a write has failed, after which answers are in memory alone."""
        self._answers: list[Any] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create this rank's file."""
        path: Any = trainer.strategy.broadcast(self._path)
        self._path, self._partial, self._answers = path, _partial_path(path, trainer.global_rank), []
        self._is_behind = False
        self._try_write(lambda partial: partial.touch(exist_ok=False))
        if self._is_behind:
            self._partial = None  # it is not there, or is another process's

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: object, **__: object
    ) -> None:
        """Add what ``predict_step`` returned for a batch: a list of answers, one answer, or None."""
        answers = list(outputs) if isinstance(outputs, (list, tuple)) else [] if outputs is None else [outputs]
        lines = _lines(answers)
        self._try_write(lambda partial: _append(partial, lines))
        self._answers += answers

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the answers of all ranks on rank 0, in the order of the rows."""
        answers = gather(self._answers)
        if self._path is not None and trainer.is_global_zero:
            write(self._path, answers)
            said = ""
            if isinstance(pl_module, AnsweringModule):
                cut = sum(isinstance(one, dict) and one.get("finish_reason") == "length" for one in answers)
                said = f"; {cut:,} of them cut at max_new_tokens={pl_module.max_new_tokens}" if cut else ""
            rank_zero_info(f"{as_count(len(answers), 'answer')}: {self._path}{said}")
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Name the file of a run that ends early."""
        if not self._answers:
            self._remove()
        elif self._partial is not None and not self._is_behind:
            print(f"answers until then: {len(self._answers):,} in {self._partial}", file=sys.stderr)

    def _remove(self) -> None:
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)

    def _try_write(self, write_to: Callable[[Path], object]) -> None:
        if self._partial is None or self._is_behind:
            return
        try:
            write_to(self._partial)
        except OSError as error:
            problem = f"{self._partial} cannot be written ({error.strerror}): answers are in memory until the end"
            warnings.warn(problem, stacklevel=2)
            self._is_behind = True


def _partial_path(whole: Path, rank: int | str) -> Path:
    return whole.with_name(f"{whole.name}.rank{rank}.partial")


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _lines(answers: Iterable[object]) -> str:
    try:
        return "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    except TypeError as error:
        raise RecipeError(
            f"{error}: answers are written as JSON; let predict_step return a list of texts, numbers or dictionaries"
        ) from error


def write(path: Path, answers: Iterable[object]) -> None:
    """Write answers to a new file, one line each.

    Raises:
        RecipeError: the file cannot be written, or has come to exist while the answers were generated; they are in a
            temporary file then, which the message names.
    """
    lines = _lines(answers)
    problem = "was written by another process meanwhile"
    if not path.exists():
        try:
            write_durably(path, lines)
            return
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
    kept = Path(tempfile.mkdtemp(prefix="lit_ft-")) / path.name
    write_durably(kept, lines)
    raise RecipeError(f"{path} {problem}; the answers are in {kept}")
