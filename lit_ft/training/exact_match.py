"""Exact-match accuracy of a model's greedy answers to held-out prompts."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft import process
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.training.causal_lm import CausalLM


class ExactMatch(Callback):
    """Exact-match accuracy: fraction of held-out prompts whose greedy answer is the expected one.

    It is measured before and after training and logged as ``val/exact_match``; ``test`` logs ``test/exact_match``.
    """

    def __init__(self, max_new_tokens: int = 64, batch_size: int = 50, samples: int = 4) -> None:
        """Set the size of answers and batches.

        Args:
            max_new_tokens: largest number of tokens of an answer.
            batch_size: number of prompts per batch.
            samples: number of answers to print after training.
        """
        self.max_new_tokens, self.batch_size, self.samples = max_new_tokens, batch_size, samples

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the base model, unless the run is resumed."""
        if trainer.global_step == 0:
            self._measure(trainer, pl_module, "val", "before training")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the trained model, and print some answers."""
        for question, expected, got in self._measure(trainer, pl_module, "val", "after training")[: self.samples]:
            rank_zero_info(f"  {'+' if got == expected else '-'} {question!r}\n    {got!r}, expected {expected!r}")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure on the test data."""
        self._measure(trainer, pl_module, "test", "test data")

    def _measure(self, trainer: Trainer, module: LightningModule, split: str, when: str) -> list[tuple[str, str, str]]:
        data = process.datamodule_of(trainer)
        if not isinstance(data, TextDataModule) or not isinstance(module, CausalLM) or split not in data.splits:
            raise RecipeError(
                "ExactMatch needs lit_ft.CausalLM and a TextDataModule with data.val_path or val_fraction"
            )
        replicas, rank = process.data_parallel(trainer)
        prompts = data.prompts(split)
        share, longest = prompts[rank::replicas], -(-len(prompts) // replicas)
        results = []
        for start in range(0, longest, self.batch_size):
            batch = share[start : start + self.batch_size]
            answers = module.answer([row["prompt"] for row in batch], self.max_new_tokens)
            results += [
                (row["question"], row["expected"].strip(), got.strip()) for row, got in zip(batch, answers, strict=True)
            ]
        right = torch.tensor([sum(got == expected for _, expected, got in results), len(results)], device=module.device)
        right = torch.as_tensor(trainer.strategy.reduce(right, reduce_op="sum")) // process.model_parallel_size(trainer)
        score = float(right[0] / right[1])
        rank_zero_info(f"{split}/exact_match {when}: {score:.1%} of {int(right[1])} held-out answers")
        for logger in trainer.loggers:
            logger.log_metrics({f"{split}/exact_match": score}, step=trainer.global_step)
        return results
