"""Loss on held-out general text during fine-tuning: a measure of forgetting."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_callbacks.evaluation.evaluation_side_effects import EveryNSteps, evaluating, on_all_ranks, written
from lit_callbacks.output.step_lines import add_lines, drop_after_step, read_lines

GENERAL_TEXT = Path(__file__).with_name("general_text.txt")
"""Paragraphs of several kinds: enough text to detect forgetting, too little to compare models."""
Loss = Callable[[Any, Sequence[Any]], tuple[Any, Any]]
"""Function from the module and some texts to their summed cross-entropy in nats and their number of tokens."""


class ForgettingProbe(Callback):
    """Measure the loss on held-out general text before, during and after training.

    It is logged as ``forgetting/loss``, in nats per token, and written to ``forgetting.jsonl`` (``step, loss,
    tokens``). The texts are distributed over the data-parallel ranks. The change of the loss is printed at the end.
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
            ValueError: there is no text, or a number is not positive.
        """
        if isinstance(texts, (str, Path)):
            texts = [part.strip() for part in Path(texts).read_text(encoding="utf-8").split("\n\n") if part.strip()]
        if not texts or batch_size < 1:
            raise ValueError(
                f"ForgettingProbe got {len(texts)} texts and batch_size={batch_size}; at least 1 is needed of each"
            )
        self.batches = [texts[i : i + batch_size] for i in range(0, len(texts), batch_size)]
        self.loss = loss
        self.path = None if path is None else Path(path)
        self._every = None if every_n_steps is None else EveryNSteps(every_n_steps)
        self._seen: list[dict[str, Any]] = []
        self._looked_at = -1
        self._is_off = self._is_unwritable = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the model before the first step; a resumed run has done so already."""
        self._is_off = self._is_unwritable = False
        self._seen, self._looked_at = [], -1
        if self._every is not None:
            self._every.last = trainer.global_step or -1
        self._write(trainer, lambda: self._take_back(trainer))
        if trainer.global_step == 0:
            self._look(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Measure every ``every_n_steps``."""
        if self._every is not None and self._every.is_time(trainer.global_step):
            self._look(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after each validation, unless ``every_n_steps`` is set."""
        if self._every is None and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure a last time, and print the change of the loss."""
        if self._looked_at != trainer.global_step:
            self._look(trainer, pl_module)
        if len(self._seen) > 1 and self._seen[0]["step"] == 0:
            before, after = self._seen[0]["loss"], self._seen[-1]["loss"]
            rank_zero_info(
                f"general text: {before:.3f} nats per token before training, {after:.3f} after ({after - before:+.3f}: "
                f"perplexity x {math.exp(min(after - before, 700)):.3g}) over {self._seen[-1]['tokens']:,} tokens"
            )

    def _take_back(self, trainer: Trainer) -> None:
        drop_after_step(self._file(trainer), trainer.global_step)
        self._seen = read_lines(self._file(trainer))

    def _look(self, trainer: Trainer, module: Any) -> None:
        if self.loss is None and not hasattr(module, "text_loss") and not self._is_off:
            self._is_off = True
            rank_zero_warn(
                f"ForgettingProbe: {type(module).__name__} has no method text_loss(texts), so nothing is measured; "
                "give it one, or pass loss=<function from module and texts to summed loss and number of tokens>"
            )
        self._looked_at = trainer.global_step
        if self._every is not None:
            self._every.done(trainer.global_step)
        if self._is_off:
            return
        measure: Loss = self.loss or (lambda module, texts: module.text_loss(texts))
        with evaluating(trainer, module):
            sums = on_all_ranks(
                trainer,
                "ForgettingProbe cannot measure, and stops looking",
                lambda: self._share(trainer, module, measure),
            )
        if sums is None:
            self._is_off = True
            return
        # All ranks of one data-parallel replica have added the same numbers to both sums.
        whole: Any = trainer.strategy.reduce(sums, reduce_op="sum")
        total, tokens = (whole * self._place(trainer)[0] / trainer.world_size).tolist()
        line = {"step": trainer.global_step, "loss": total / max(tokens, 1), "tokens": int(tokens)}
        self._seen.append(line)
        for logger in trainer.loggers:
            logger.log_metrics({"forgetting/loss": line["loss"]}, step=trainer.global_step)
        self._write(trainer, lambda: add_lines(self._file(trainer), [line]))

    def _place(self, trainer: Trainer) -> tuple[int, int]:
        place = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return place["num_replicas"], place["rank"]

    def _share(self, trainer: Trainer, module: Any, measure: Loss) -> torch.Tensor:
        """Summed loss in nats and number of tokens of this replica's texts, ``(2,)``, fp32."""
        replicas, rank = self._place(trainer)
        sums = torch.zeros(
            2, dtype=torch.float32, device=trainer.strategy.root_device
        )  # bf16-true makes bf16 the default
        for start in range(0, len(self.batches), replicas):
            mine = start + rank < len(self.batches)
            # All ranks run the model equally often: under sharding the others need this rank's shard of the weights.
            total, tokens = measure(module, self.batches[start + rank if mine else 0])
            sums += mine * torch.stack([torch.as_tensor(value).float().to(sums.device) for value in (total, tokens)])
        return sums

    def _write(self, trainer: Trainer, write: Callable[[], Any]) -> None:
        if trainer.is_global_zero and not self._is_unwritable:
            what = f"ForgettingProbe cannot write {str(self._file(trainer))!r}; give path="
            self._is_unwritable = not written(what, write)

    def _file(self, trainer: Trainer) -> Path:
        return self.path or Path(trainer.default_root_dir) / "forgetting.jsonl"
