"""Exact-match accuracy of a model's greedy answers to held-out prompts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lit_callbacks.output.step_lines import drop_after_step
from lit_callbacks.report.report_data import VALIDATION_ANSWERS
from lit_callbacks.report.scored_answers import ScoredAnswer, write_answers

from lit_ft import process
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.model.generation import GeneratedAnswer, prompt_size
from lit_ft.run import predictions
from lit_ft.training.answering import AnsweringModule
from lit_ft.training.causal_lm import CausalLM


def answer_rows(
    module: AnsweringModule,
    prompts: Sequence[Mapping[str, str]],
    rows: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    rounds: int,
) -> dict[int, ScoredAnswer]:
    """Greedy answers to prompts, by their number.

    Args:
        module: module that answers.
        prompts: each with ``prompt``, ``question`` and ``expected``.
        rows: numbers of the prompts that are answered.
        max_new_tokens: largest number of tokens of an answer.
        batch_size: number of prompts per batch.
        rounds: number of rows of the rank that has the most: each rank needs as many batches.
    """
    scored: dict[int, ScoredAnswer] = {}
    by_size = sorted(rows, key=lambda row: prompt_size(prompts[row]["prompt"]), reverse=True)
    for start in range(0, rounds, batch_size):
        batch = by_size[start : start + batch_size]
        answers = module.ended_answers([prompts[row]["prompt"] for row in batch], max_new_tokens)
        scored |= {row: _scored(prompts[row], answer) for row, answer in zip(batch, answers, strict=True)}
    return {row: scored[row] for row in rows}


class ExactMatch(Callback):
    """Exact-match accuracy: fraction of held-out prompts whose greedy answer is the expected one.

    It is measured before and after training and logged as ``val/exact_match``; ``test`` logs ``test/exact_match``. The
    answers before and after training are in ``validation_answers.jsonl`` of the run folder, and the report shows some.
    """

    names: tuple[str, ...] = ("exact_match",)
    """Names of the scores, after ``val/`` or ``test/``."""

    def __init__(self, max_new_tokens: int = 64, batch_size: int = 50, samples: int = 4) -> None:
        """Set the size of answers and batches.

        Args:
            max_new_tokens: largest number of tokens of an answer.
            batch_size: number of prompts per batch.
            samples: number of answers to print after training.

        Raises:
            RecipeError: a number is out of range.
        """
        if max_new_tokens < 1 or batch_size < 1 or samples < 0:
            raise RecipeError(
                f"ExactMatch: max_new_tokens={max_new_tokens} and batch_size={batch_size} must be 1 or more, and "
                f"samples={samples} 0 or more"
            )
        self.max_new_tokens, self.batch_size, self.samples = max_new_tokens, batch_size, samples

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the base model, unless the run is resumed."""
        if trainer.is_global_zero:
            self._write(trainer, lambda folder: drop_after_step(folder / VALIDATION_ANSWERS, trainer.global_step))
        _asked(trainer, pl_module, "val")  # which keeps them: files may change in mid-run
        if trainer.global_step == 0:
            self._keep(trainer, self._measure(trainer, pl_module, "val", "before training"))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the trained model, and print some answers."""
        answers = self._measure(trainer, pl_module, "val", "after training")
        self._keep(trainer, answers)
        for one in answers[: self.samples]:
            shown = f"{one.question!r}\n    {one.answer!r}, expected {one.expected!r}"
            rank_zero_info(f"  {'+' if one.is_right else '-'} {shown}")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure on the test data."""
        self._measure(trainer, pl_module, "test", "test data")

    def _measure(self, trainer: Trainer, module: LightningModule, split: str, when: str) -> list[ScoredAnswer]:
        """Log the accuracy, and return the answers: all on rank 0, none on other ranks. A collective."""
        answers = self._answers(trainer, *_asked(trainer, module, split))
        own = list(answers.values())
        count = sum(one.is_right for one in own), sum(one.finish_reason == "length" for one in own), len(own)
        counts = torch.tensor(count, device=module.device)
        total = torch.as_tensor(trainer.strategy.reduce(counts, reduce_op="sum"))
        right, cut, asked = (total // process.model_parallel_size(trainer)).tolist()
        score = right / asked
        said = f"; {cut:,} of them cut at max_new_tokens={self.max_new_tokens}" if cut else ""
        rank_zero_info(f"{split}/exact_match {when}: {score:.1%} of {asked} held-out answers{said}")
        rows = predictions.gather([{"row": row, "answer": answer} for row, answer in answers.items()])
        gathered: list[ScoredAnswer] = [row["answer"] for row in rows]
        further = self.further_scores(gathered) if gathered else {}
        if further:
            rank_zero_info(f"{when}: " + ", ".join(f"{split}/{name} {value:.1%}" for name, value in further.items()))
        scores = {f"{split}/{name}": value for name, value in {"exact_match": score, **further}.items()}
        for logger in trainer.loggers:
            logger.log_metrics(scores, step=trainer.global_step)
        return gathered

    def further_scores(self, answers: Sequence[ScoredAnswer]) -> dict[str, float]:
        """Scores besides exact match, by name; on rank 0, of all answers."""
        return {}

    def _answers(self, trainer: Trainer, module: CausalLM, prompts: list[dict[str, str]]) -> dict[int, ScoredAnswer]:
        """Answers to this data-parallel rank's share of the prompts, by the number of the prompt."""
        replicas, rank = process.data_parallel(trainer)
        share, longest = range(rank, len(prompts), replicas), -(-len(prompts) // replicas)
        return answer_rows(module, prompts, share, self.max_new_tokens, self.batch_size, longest)

    def _keep(self, trainer: Trainer, answers: list[ScoredAnswer]) -> None:
        if answers:
            self._write(trainer, lambda folder: write_answers(folder, trainer.global_step, answers))

    @staticmethod
    def _write(trainer: Trainer, write: Callable[[Path], None]) -> None:
        folder = Path(trainer.default_root_dir)
        try:
            write(folder)
        except OSError as error:  # the accuracy is logged anyway
            rank_zero_warn(f"ExactMatch cannot write answers to {str(folder)!r} ({error}); give another --run_dir")


def _asked(trainer: Trainer, module: LightningModule, split: str) -> tuple[CausalLM, list[dict[str, str]]]:
    """The module, and the prompts of a split."""
    data = process.datamodule_of(trainer)
    if not isinstance(data, TextDataModule) or not isinstance(module, CausalLM) or split not in data.splits:
        raise RecipeError("ExactMatch needs lit_ft.CausalLM and a TextDataModule with data.val_path or val_fraction")
    return module, prompts_of(data, split)


def prompts_of(data: TextDataModule, split: str) -> list[dict[str, str]]:
    """Prompts of a split.

    Raises:
        RecipeError: there is none.
    """
    if not (prompts := data.splits.prompts(split)):
        raise RecipeError(
            f"trainer.callbacks: ExactMatch compares with known answers, and no row of the {split} data is a prompt "
            "with one; leave ExactMatch out, or give data with answers to prompts"
        )
    return prompts


def _scored(prompt: Mapping[str, str], answer: GeneratedAnswer) -> ScoredAnswer:
    expected, text = prompt["expected"].strip(), answer.text.strip()
    return ScoredAnswer(prompt["question"], expected, text, text == expected, finish_reason=answer.finish_reason)
