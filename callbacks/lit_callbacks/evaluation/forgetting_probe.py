"""Loss on held-out general text during fine-tuning: a measure of forgetting."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lit_callbacks.evaluation.evaluation_side_effects import EvaluatedWeights, EveryNSteps, evaluating, on_all_ranks
from lit_callbacks.evaluation.sample_generations import SampleGenerations
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.output.attempts import written
from lit_callbacks.output.step_lines import add_lines, drop_after_step, read_lines
from lit_callbacks.protocols import MeasuresTextLoss
from lit_callbacks.run_folder import run_folder

GENERAL_TEXT = Path(__file__).with_name("general_text.txt")
"""Paragraphs of several kinds: enough text to detect forgetting, too little to compare models."""
Loss = Callable[[Any, Sequence[Any]], tuple[Any, Any]]
"""Function from the module and some texts to their summed cross-entropy in nats and their number of tokens."""


class Measurement(TypedDict):
    """Line of ``forgetting.jsonl``."""

    step: int
    """Optimizer steps done."""
    loss: float
    """Mean over tokens, in nats."""
    tokens: int


class ForgettingProbe(Callback):
    """Measure the loss on held-out general text before, during and after training.

    It is logged as ``forgetting/loss``, in nats per token, which other callbacks may monitor, and written to
    ``forgetting.jsonl`` (``step, loss, tokens``). The texts are distributed over the data-parallel ranks. The change of
    the loss is printed at the end. A callback that replaces the weights at the end, e.g. by averages, comes before this
    one in the list.
    """

    def __init__(
        self,
        texts: Sequence[Any] | str | Path = GENERAL_TEXT,
        every_n_steps: int | None = None,
        batch_size: int = 8,
        loss: Loss | None = None,
        path: str | Path | None = None,
    ) -> None:
        """Set the texts, the interval and the loss function.

        Args:
            texts: held-out texts, or the path of a text file with an empty line between two texts. A ``loss`` function
                may take items of another type.
            every_n_steps: optimizer steps between two measurements; None measures after each validation.
            batch_size: number of texts in a forward pass.
            loss: function from the module and a list of texts to their summed cross-entropy in nats and their number of
                tokens; None takes the module's method ``text_loss(texts)``, which returns the same.
            path: JSONL file for the measurements; None is ``forgetting.jsonl`` in ``trainer.default_root_dir``.

        Raises:
            ValueError: there is no text, one is blank, or a number is not positive.
        """
        if isinstance(texts, (str, Path)):
            texts = [part.strip() for part in Path(texts).read_text(encoding="utf-8").split("\n\n") if part.strip()]
        if not texts or batch_size < 1:
            raise ValueError(
                f"ForgettingProbe got {len(texts)} texts and batch_size={batch_size}; at least 1 is needed of each"
            )
        if blank := [number for number, text in enumerate(texts, 1) if isinstance(text, str) and not text.strip()]:
            raise ValueError(f"ForgettingProbe: text {blank[0]} of {len(texts)} is blank, and has no loss; take it out")
        self.batches = [texts[i : i + batch_size] for i in range(0, len(texts), batch_size)]
        self.loss = loss
        self.path = None if path is None else Path(path)
        self._every = None if every_n_steps is None else EveryNSteps(every_n_steps)
        self._measured: list[Measurement] = []
        self._measured_at = -1
        self._weights = EvaluatedWeights()
        self._is_off = self._is_unwritable = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error if another callback writes to the same file: their lines could not be told apart.

        Raises:
            ValueError: another ``ForgettingProbe`` or a ``SampleGenerations`` of the trainer has the same path.
        """
        mine, callbacks = self._file(trainer), attributes_of(trainer).callbacks
        writers = [one for one in callbacks if isinstance(one, ForgettingProbe | SampleGenerations) and one is not self]
        if stage == "fit" and (other := next((one for one in writers if one._file(trainer) == mine), None)) is not None:
            raise ValueError(
                f"ForgettingProbe and another callback, {type(other).__name__}, write {str(mine)!r}; give each its own "
                "path="
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the model before the first step; a resumed run has done so already."""
        self._is_off = self._is_unwritable = False
        self._measured, self._measured_at = [], -1
        if self._every is not None:
            self._every.last = trainer.global_step or -1
        self._write(trainer, lambda: self._drop_repeated(trainer))
        if trainer.global_step == 0:
            self._measure(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Measure every ``every_n_steps``."""
        if self._every is not None and self._every.is_time(trainer.global_step):
            self._measure(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after each validation, unless ``every_n_steps`` is set."""
        if self._every is None and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure a last time, also if the weights were replaced after the last step, and print the loss's change."""
        is_done = self._measured_at == trainer.global_step
        if not is_done or (not self._is_off and self._weights.have_changed(trainer, pl_module)):
            self._measure(trainer, pl_module)
        if len(self._measured) > 1 and self._measured[0]["step"] == 0:
            before, after = self._measured[0]["loss"], self._measured[-1]["loss"]
            rank_zero_info(
                f"general text: {before:.3f} nats per token before training, {after:.3f} after ({after - before:+.3f}: "
                f"perplexity x {math.exp(min(after - before, 700)):.3g}) over {self._measured[-1]['tokens']:,} tokens"
            )

    def _drop_repeated(self, trainer: Trainer) -> None:
        drop_after_step(self._file(trainer), trainer.global_step)
        self._measured = [
            Measurement(step=line["step"], loss=line["loss"], tokens=line["tokens"])
            for line in read_lines(self._file(trainer))
            if Measurement.__required_keys__ <= line.keys()  # an earlier run may have written others to it
        ]

    def _measure(self, trainer: Trainer, module: LightningModule) -> None:
        loss: Loss | None = self.loss
        if loss is None and isinstance(module, MeasuresTextLoss):
            loss = _loss_of_module
        if loss is None and not self._is_off:
            self._is_off = True
            rank_zero_warn(
                f"ForgettingProbe: {type(module).__name__} has no method text_loss(texts), so nothing is measured; "
                "give it one, or pass loss=<function from module and texts to summed loss and number of tokens>"
            )
        self._measured_at = trainer.global_step
        if self._every is not None:
            self._every.done(trainer.global_step)
        if self._is_off or loss is None:
            return
        with evaluating(trainer, module):
            self._weights.remember(module)
            sums = on_all_ranks(
                trainer,
                "ForgettingProbe cannot measure, and stops looking",
                lambda: self._sums_of_replica(trainer, module, loss),
            )
        if sums is None:
            self._is_off = True
            return
        # All ranks of one data-parallel replica have added the same numbers to both sums.
        over_ranks = trainer.strategy.reduce(sums, reduce_op="sum")
        total, tokens = (over_ranks * self._replicas_and_rank(trainer)[0] / trainer.world_size).tolist()
        line = Measurement(step=trainer.global_step, loss=total / max(tokens, 1), tokens=int(tokens))
        self._measured.append(line)
        trainer.callback_metrics["forgetting/loss"] = torch.tensor(line["loss"])  # for callbacks that monitor it
        for logger in trainer.loggers:
            logger.log_metrics({"forgetting/loss": line["loss"]}, step=trainer.global_step)
        self._write(trainer, lambda: add_lines(self._file(trainer), [line]))

    def _replicas_and_rank(self, trainer: Trainer) -> tuple[int, int]:
        sampler = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return sampler["num_replicas"], sampler["rank"]

    def _sums_of_replica(self, trainer: Trainer, module: LightningModule, loss: Loss) -> Tensor:
        """Summed loss in nats and number of tokens of this replica's texts, ``(2,)``, fp32."""
        replicas, rank = self._replicas_and_rank(trainer)
        sums = torch.zeros(
            2, dtype=torch.float32, device=trainer.strategy.root_device
        )  # bf16-true makes bf16 the default
        for start in range(0, len(self.batches), replicas):
            mine = start + rank < len(self.batches)
            # All ranks run the model equally often: under sharding the others need this rank's shard of the weights.
            total, tokens = loss(module, self.batches[start + rank if mine else 0])
            sums += mine * torch.stack([torch.as_tensor(value).float().to(sums.device) for value in (total, tokens)])
        return sums

    def _write(self, trainer: Trainer, write: Callable[[], object]) -> None:
        if trainer.is_global_zero and not self._is_unwritable:
            what = f"ForgettingProbe cannot write {str(self._file(trainer))!r}; give path="
            self._is_unwritable = not written(what, write)

    def _file(self, trainer: Trainer) -> Path:
        return self.path or run_folder(trainer) / "forgetting.jsonl"


def _loss_of_module(module: MeasuresTextLoss, texts: Sequence[str]) -> tuple[Tensor | float, Tensor | float]:
    return module.text_loss(texts)
