"""Ledger of the loss of every sample at every visit."""

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import compress
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lit_callbacks.batch_ids import PerSample, batch_ids, batch_sources
from lit_callbacks.distributed.host_copy import queued_copy
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.loss_ledger.ledger_files import Visits, forget, get_ready, read_visits, write_part
from lit_callbacks.loss_ledger.ledger_summary import MOST_BY_CHANCE, Summary, summarize, with_nulls
from lit_callbacks.output.attempts import Attempts, written
from lit_callbacks.output.tables import show_table
from lit_callbacks.protocols import LooksUpTexts, RecordsLosses
from lit_callbacks.run_folder import run_folder

TEXT_KEPT, TEXT_SHOWN = 500, 60
"""Maximum characters of a sample's text in the summary, and in the table on the terminal."""
TOKENS_KEPT = 1024
"""Maximum number of token losses of a batch that are kept on the device until a write; of more, only the means are."""
LEAST_LIKENESS = 0.8
"""Minimum similarity of two texts (``difflib``'s ratio, 0 to 1) to report samples with like losses as duplicates."""
SUMMARY = "summary.json"
"""File name of the result of ``summarize``, in the ledger's folder."""

TextsOf = Callable[[Sequence[str]], Mapping[str, str]]
"""Function from ids of samples to their texts by id."""
_Counts = Tensor | Sequence[int]


class _Record(NamedTuple):
    """Losses of some samples, on their device."""

    step: int
    epoch: int
    ids: Tensor | list[object]
    sources: Tensor | list[object]
    losses: Tensor
    """Of each sample, or of each supervised token."""
    tokens: _Counts
    """Number of supervised tokens of each sample."""
    per_token: bool


class LossLedger(Callback):
    """Record the loss of each sample at each visit; at the end, report the worst, those that rose, and duplicates.

    Likely duplicates are samples whose losses go together. Where their texts are not known, only those are named that
    hardly any two of the compared samples are as near as by chance: that takes several visits of each.

    Losses come from one of three sources:

    - ``training_step`` returns a dict with ``sample_losses``, ``(samples,)``, the mean loss of each sample, or with
      ``token_losses``, ``(samples, tokens)``, and optionally ``token_mask`` (by default, losses of 0 do not count);
    - the module has an attribute ``record_losses``: it is this callback's ``record`` during training and None
      otherwise, and the module calls it in its training step;
    - other code calls ``record``.

    Tensors stay on their device until they are written, so no step waits for them.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        write_every_n_steps: int = 100,
        top: int = 20,
        ids: Callable[[Any], Any] = batch_ids,
        sources: Callable[[Any], Any] = batch_sources,
        texts: TextsOf | None = None,
    ) -> None:
        """Set the folder and the functions that read a batch.

        Args:
            folder: folder of the ledger files, Parquet if pyarrow is installed, else CSV; None is ``loss_ledger`` in
                ``trainer.default_root_dir``.
            write_every_n_steps: optimizer steps between two writes.
            top: maximum number of samples in each list of the summary.
            ids: function from a batch to one id per sample, the same at each visit of a sample, or to None.
            sources: function from a batch to one source per sample, or to None.
            texts: function from ids to texts by id, to print the reported samples and to tell duplicates from samples
                with similar losses by chance; None takes the data module's method ``sample_texts(ids)``, where it has
                one.

        Raises:
            ValueError: a number is not positive.
        """
        if write_every_n_steps < 1 or top < 1:
            raise ValueError(
                f"LossLedger(write_every_n_steps={write_every_n_steps}, top={top}): each must be 1 or more"
            )
        self.folder = None if folder is None else Path(folder)
        self.write_every_n_steps, self.top = write_every_n_steps, top
        self.ids, self.sources, self.texts = ids, sources, texts
        self._pending: list[_Record] = []
        self._step = self._epoch = 0
        self._started = self._written_at = 0
        self._is_off = False
        self._has_recorded = False
        self._attempts = Attempts("LossLedger")

    # --- recording -----------------------------------------------------------------------------------

    def record(
        self,
        ids: PerSample,
        losses: Tensor,
        tokens: _Counts | None = None,
        sources: PerSample | None = None,
        per_token: bool = False,
    ) -> None:
        """Record the losses of some samples in the current optimizer step.

        Args:
            ids: one id per sample, a list or tensor.
            losses: mean loss over each sample's supervised tokens, in nats, ``(samples,)``.
            tokens: number of supervised tokens of each sample, ``(samples,)``; None is 1 each.
            sources: one source per sample; None where there are none.
            per_token: whether ``losses`` holds the loss of every supervised token, ``(supervised tokens,)``, sample
                after sample, and ``tokens`` is a list.
        """
        names = _kept(ids)
        self._has_recorded = True
        source_names = _kept([""] * len(names) if sources is None else sources)
        losses = losses.detach().flatten()
        counts = [1] * len(names) if tokens is None else tokens.flatten() if isinstance(tokens, Tensor) else tokens
        expected = sum(numbers := _numbers(counts)) if per_token else len(names)
        is_negative = per_token and min(numbers, default=0) < 0
        if len(losses) != expected or is_negative or not len(names) == len(counts) == len(source_names):
            rank_zero_warn(
                f"LossLedger.record got {len(names)} ids, {len(losses)} losses, {len(counts)} token counts and "
                f"{len(source_names)} sources, and leaves them out; give one of each for each sample"
                + (f", and with per_token=True {expected} losses: the sum of the token counts" if per_token else "")
            )
        elif len(names) > 0 and not self._is_off:
            if per_token and expected > TOKENS_KEPT:
                losses, per_token = _sample_means(losses, counts, per_token), False
            self._pending.append(_Record(self._step, self._epoch, names, source_names, losses, counts, per_token))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give ``record`` to the module, and delete records of steps that this run repeats."""
        self._started = self._written_at = trainer.global_step
        self._pending, self._has_recorded = [], False
        self._attempts = Attempts("LossLedger")  # each fit has warnings of its own
        self._step, self._epoch = trainer.global_step, trainer.current_epoch
        self._safely(lambda: forget(self._root(trainer), trainer.global_step, trainer.global_rank, trainer.world_size))
        self._lend(pl_module, self.record)
        get_ready()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the current epoch."""
        self._step, self._epoch = trainer.global_step, trainer.current_epoch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Record the losses that the step returned; write every ``write_every_n_steps``."""
        try:
            self._record_outputs(outputs, batch)
        except Exception as error:  # unexpected shapes or an error in the user's function must not end the run
            self._has_recorded = True
            self._attempts.warn(
                f"cannot keep a step's losses ({type(error).__name__}: {error}); 'sample_losses' is (samples,), "
                "'token_losses' (samples, tokens), and ids= and sources= return one of each a sample",
                f"step {type(error).__name__}",
            )
        # Micro-batches before the first optimizer step may be empty, and have no losses.
        if not self._has_recorded and trainer.global_step > self._started:
            self._attempts.warn(
                f"no losses of samples: {type(pl_module).__name__}.training_step returns neither "
                "'sample_losses' nor 'token_losses', and nothing has called record; nothing is kept until it does"
            )
        self._step = trainer.global_step
        if self._step - self._written_at >= self.write_every_n_steps:
            self._write(trainer)

    def _record_outputs(self, outputs: STEP_OUTPUT, batch: object) -> None:
        if not isinstance(outputs, Mapping) or (losses_and_tokens := _returned(outputs)) is None:
            return
        if (ids := outputs.get("sample_ids", self.ids(batch))) is None:
            self._attempts.warn(
                f"cannot tell samples apart: the {type(batch).__name__} has no 'sample_ids', so their losses are not "
                "kept; add them to the batch, or pass ids=<function from batch to list>"
            )
            self._has_recorded = True
        else:
            self.record(ids, *losses_and_tokens, self.sources(batch))

    # --- writing -------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the records so far, if the device still gives them: after a CUDA error it may not."""
        self._lend(pl_module, None)
        self._attempts.result("cannot keep the last losses", lambda: self._write(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the remaining records; on rank 0, summarize the records of all ranks."""
        self._lend(pl_module, None)
        self._write(trainer)
        trainer.strategy.barrier("LossLedger")
        if trainer.is_global_zero and not self._is_off:
            self._safely(lambda: self._sum_up(self._root(trainer), trainer))

    def _add_texts(self, summary: Summary, texts_of: TextsOf | None) -> None:
        pairs = summary["twins"]
        summary["twins"] = [pair for pair in pairs if pair["by_chance"] <= MOST_BY_CHANCE]
        if texts_of is None:
            return
        samples = [*summary["worst"], *summary["best"], *summary["risen"]]
        ids = [*(sample["id"] for sample in samples), *(name for pair in pairs for name in pair["ids"])]
        if not (texts := self._attempts.result("no texts of samples", lambda: _known(texts_of(ids)))):
            return
        for sample in samples:
            sample["text"] = texts.get(sample["id"], "")[:TEXT_KEPT]
        pairs = [pair for pair in pairs if all(name in texts for name in pair["ids"])]
        for pair in pairs:
            first, second = (texts[name][:TEXT_KEPT] for name in pair["ids"])
            pair["text"] = first
            pair["likeness"] = SequenceMatcher(None, first, second, autojunk=False).ratio()
        summary["twins"] = [pair for pair in pairs if pair["likeness"] >= LEAST_LIKENESS]

    def _lend(self, module: LightningModule, record: Callable[..., None] | None) -> None:
        if isinstance(module, RecordsLosses):
            module.record_losses = record

    def _root(self, trainer: Trainer) -> Path:
        return self.folder or run_folder(trainer) / "loss_ledger"

    def _write(self, trainer: Trainer) -> None:
        self._written_at = trainer.global_step
        pending, self._pending = self._pending, []
        if not pending or self._is_off:
            return
        # The only synchronization with the device.
        losses = torch.cat([_sample_means(part.losses, part.tokens, part.per_token) for part in pending]).tolist()
        tokens = [count for part in pending for count in _numbers(part.tokens)]
        visits = Visits(
            step=list(compress((part.step for part in pending for _ in part.ids), tokens)),
            epoch=list(compress((part.epoch for part in pending for _ in part.ids), tokens)),
            id=list(compress((str(name) for part in pending for name in _listed(part.ids)), tokens)),
            source=list(compress((str(source) for part in pending for source in _listed(part.sources)), tokens)),
            loss=list(compress(losses, tokens)),
            tokens=list(compress(tokens, tokens)),
        )
        if visits.id:
            self._safely(lambda: write_part(self._root(trainer), self._started, trainer.global_rank, visits))

    def _safely(self, write: Callable[[], object]) -> None:
        if not written("LossLedger cannot write, so no losses are kept from here on; give folder=", write):
            self._is_off, self._pending = True, []

    def _sum_up(self, folder: Path, trainer: Trainer) -> None:
        try:
            visits = read_visits(folder)
        except ModuleNotFoundError as error:  # an earlier part of the run had pyarrow
            rank_zero_warn(
                f"LossLedger cannot read the Parquet files in {str(folder)!r}, so there is no summary: {error.name} is "
                "missing; pip install 'lit-ft-callbacks[parquet]'"
            )
            return
        except (OSError, ValueError, LookupError) as error:  # training itself has succeeded
            rank_zero_warn(f"LossLedger cannot read {str(folder)!r} ({error}), so there is no summary; remove the file")
            return
        if not visits:
            return
        summary = summarize(visits, self.top)
        data = attributes_of(trainer).datamodule
        self._add_texts(summary, self.texts or (data.sample_texts if isinstance(data, LooksUpTexts) else None))
        found, summary["twins"] = len(summary["twins"]), summary["twins"][: self.top]
        text = json.dumps(with_nulls(summary), indent=1, ensure_ascii=False, allow_nan=False)
        (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
        header = ("sample", "source", "tokens", "visits", "first", "last", "text")
        rows = [[_shown(sample.get(key, "")) for key in ("id", *header[1:])] for sample in summary["worst"]]
        show_table(f"worst of {summary['samples']:,} samples, loss in {summary['unit']}", header, rows)
        if pairs := [" = ".join(pair["ids"]) for pair in summary["twins"]]:
            how = "their texts are alike" if "text" in summary["twins"][0] else "look at their texts"
            rank_zero_info(f"likely duplicates, by how their losses go ({how}): {', '.join(pairs)}")
            if found > len(pairs):
                rank_zero_info(f"these are the nearest {len(pairs):,} of {found:,} pairs; top= lists more")
        rank_zero_info(f"losses of all samples: {folder}")


def _known(texts: Mapping[str, object]) -> dict[str, str]:
    """Texts by id, without those that are None."""
    return {str(name): str(text) for name, text in texts.items() if text is not None}


def _shown(cell: object) -> object:
    return shorten(cell, TEXT_SHOWN, placeholder="...") if isinstance(cell, str) else cell


def _kept(values: PerSample) -> Tensor | list[object]:
    """Values as they are kept until a write: a tensor on its device, which ``tolist`` would wait for.

    It is a copy, because a view would keep all of the batch.
    """
    return values.detach().clone() if isinstance(values, Tensor) else list(values)


def _listed(values: Tensor | list[object]) -> list[object]:
    return values.tolist() if isinstance(values, Tensor) else values


def _numbers(counts: _Counts) -> list[int]:
    return [int(count) for count in (counts.tolist() if isinstance(counts, Tensor) else counts)]


def _sample_means(losses: Tensor, counts: _Counts, per_token: bool) -> Tensor:
    """Mean loss of each sample in nats, ``(samples,)``, fp32; 0 for a sample without supervised tokens."""
    if not per_token:
        return losses.float()
    lengths = torch.as_tensor(counts)
    lengths = queued_copy(lengths, losses.device) if lengths.device.type == "cpu" else lengths
    # The numbers add up to that of the losses: checked where they were recorded. A second check would wait for a GPU.
    return torch.segment_reduce(losses.float(), "mean", lengths=lengths, initial=0, unsafe=True)


def _returned(outputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None] | None:
    """Mean loss and number of tokens of each sample, ``(samples,)`` each, from the outputs of ``training_step``."""
    if "sample_losses" in outputs:
        return outputs["sample_losses"], outputs.get("sample_tokens")
    if "token_losses" not in outputs:
        return None
    losses = outputs["token_losses"].detach().float()  # (samples, tokens); a sum in bf16 has 8 bits
    mask = outputs.get("token_mask", losses != 0)
    tokens = mask.sum(1)
    counted = (losses * mask).where(mask != 0, 0.0)  # padding may be NaN, which a product with 0 leaves
    return counted.sum(1) / tokens.clamp(min=1), tokens
