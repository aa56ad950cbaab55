"""Export of the adapter and the merged model to folders that Hugging Face tools load."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from lit_callbacks.answering_weights import weights_that_answer
from lit_callbacks.distributed.failures import failing_together
from lit_callbacks.distributed.gather import full_weights, is_split, reshard
from lit_callbacks.either_package import is_a
from lit_callbacks.export.atomic_folder import check_replaceable, keep_newest, recover, write_atomically
from lit_callbacks.export.base_files import BaseFiles, add_files
from lit_callbacks.export.merge_check import MergeFailed
from lit_callbacks.export.merging import (
    check_mergeable,
    find_model,
    find_models,
    is_peft,
    save_adapter,
    save_merged,
    unsplit,
    write_adapter,
)
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.internals.transformers_internals import is_quantized
from lit_callbacks.phases import writing
from lit_callbacks.protocols import (
    GathersWeights,
    SavesAdapter,
    WritesFolder,
    WritesModelFolder,
    tokenizer_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Kind = Literal["adapter", "merged"]
Texts = Callable[[Kind, Trainer, LightningModule], Mapping[str, str]]
"""Function from the kind of a folder, trainer and module to text files for it by name, e.g. a model card."""


class AdapterMerger(Callback):
    """Write the adapter and, optionally, the merged model: at the end of training, and optionally during it.

    The module must contain a ``peft.PeftModel`` or, for full fine-tuning, a ``transformers.PreTrainedModel`` (the extra
    ``peft``); its ``tokenizer``, where it has one, is saved with the weights. A module that writes its trainable
    parameters itself needs neither: it has a method ``save_adapter(folder, state_dict)``, which gets the full weights
    by name where they are sharded. Of several models, frozen ones (a teacher, a reward model) are passed over; a
    warning names what is trained and not written.

    Folders are written atomically. A tuning method that cannot be merged is an error when training starts. During
    training, a model that cannot be written or fails its check is a warning; at the end it is an error. Schedule-free
    optimizers, which keep two sets of weights (``train()`` and ``eval()``), are in ``eval()`` mode while models are
    written during training. With ``fast_dev_run`` no existing model is replaced.
    """

    def __init__(
        self,
        adapter_dir: str | Path,
        merged_dir: str | Path | None = None,
        texts: Texts | None = None,
        every_n_steps: int | None = None,
        on_best: bool = False,
        keep_last: int = 3,
    ) -> None:
        """Set the folders and the times of writing.

        Args:
            adapter_dir: folder of the adapter, for ``PeftModel.from_pretrained``; not written in full fine-tuning.
            merged_dir: folder of the merged model, for ``AutoModelForCausalLM.from_pretrained``; None does not merge.
            texts: function that returns text files to add to a folder, by name, e.g. a ``README.md`` that replaces
                PEFT's template; it gets the kind of the folder (``adapter`` or ``merged``), the trainer and the module.
            every_n_steps: optimizer steps between two models that are also written during training, to
                ``<adapter_dir>-step-<n>`` and ``<merged_dir>-step-<n>``; None writes none.
            on_best: whether to write a model also when a ``ModelCheckpoint`` with a ``monitor`` saves a new best
                checkpoint, to ``<adapter_dir>-best-step-<n>`` and ``<merged_dir>-best-step-<n>``, with that
                checkpoint's weights.
            keep_last: number of models to keep, the newest, of those by ``every_n_steps`` and of those by ``on_best``.

        Raises:
            ValueError: ``every_n_steps`` or ``keep_last`` is below 1, or both folders are the same.
        """
        for name, value in (("every_n_steps", every_n_steps), ("keep_last", keep_last)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1; leave it out for the default")
        if merged_dir is not None and os.path.realpath(adapter_dir) == os.path.realpath(merged_dir):
            raise ValueError(
                f"adapter_dir and merged_dir are both {str(merged_dir)!r}, and the merged model would replace the "
                "adapter; give each a folder of its own"
            )
        self.adapter_dir = Path(adapter_dir)
        self.merged_dir = None if merged_dir is None else Path(merged_dir)
        self.texts: Texts = texts or _no_texts
        self.every_n_steps, self.on_best, self.keep_last = every_n_steps, on_best, keep_last
        self._best: list[tuple[str, Tensor | None]] = []
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error for a model that cannot be merged or a folder that cannot be written, before training."""
        model = find_model(pl_module)
        if self.merged_dir is not None:
            if is_quantized(model.get_base_model() if is_peft(model) else model):
                raise ValueError(
                    f"merged_dir={str(self.merged_dir)!r}, but the base is quantized, and there are two ways to merge "
                    "into it; leave merged_dir out, and merge after training by "
                    "lit_callbacks.merging.save_merged(model, folder, quantized_base='dequantize' or 'keep')"
                )
            check_mergeable(model)
        self._check_folders(pl_module, model)
        _warn_of_what_is_not_written(pl_module)
        if self.on_best and not _monitored(trainer):
            rank_zero_warn(
                "AdapterMerger(on_best=True) writes nothing on the way: no ModelCheckpoint has a monitor; give one, as "
                "ModelCheckpoint(monitor='val/loss')"
            )
        self._best, self._last_step = _best(trainer), trainer.global_step

    def _folders(self, module: LightningModule, model: nn.Module, suffix: str = "") -> list[Path]:
        """Folders of the adapter and the merged model, as far as they are written; of the final ones without suffix."""
        is_adapter = model is module or is_peft(model)
        folders = [self.adapter_dir if is_adapter else None, self.merged_dir]
        return [folder.with_name(folder.name + suffix) for folder in folders if folder is not None]

    @staticmethod
    def _would_replace_trained(trainer: Trainer, folders: list[Path]) -> bool:
        """Whether this is a trial of a few batches and there are models that it would replace; a collective."""
        if not attributes_of(trainer).fast_dev_run:
            return False
        present = [str(folder) for folder in folders if folder.exists()]
        if not trainer.strategy.broadcast(bool(present)):
            return False
        rank_zero_warn(
            f"AdapterMerger keeps {', '.join(present)}: a fast_dev_run replaces no model; remove it to try that"
        )
        return True

    def _check_folders(self, module: LightningModule, model: nn.Module) -> None:
        """Raise an error for a folder that is found impossible at the end otherwise, when weights would be lost.

        On every rank, so that no rank waits for one that has raised.
        """
        for folder in map(Path, map(os.path.realpath, self._folders(module, model))):
            check_replaceable(folder)
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                is_writable = os.access(folder.parent, os.W_OK)
            except OSError:
                is_writable = False
            if not is_writable:
                raise ValueError(
                    f"AdapterMerger cannot write {str(folder)!r} at the end of training: {str(folder.parent)!r} is no "
                    "folder that this user may write to; name another one"
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Write the model of a new best checkpoint, whose weights it has until this batch."""
        self._write_best(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Write a model every ``every_n_steps``."""
        step, before, every = trainer.global_step, self._last_step, self.every_n_steps
        self._last_step = step
        if every is not None and step // every != before // every:
            self._write_on_the_way(trainer, pl_module, "step-")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the folders, on rank 0; the other ranks send their shards."""
        self._write_best(trainer, pl_module)
        self.write_final(trainer, pl_module)

    def write_final(self, trainer: Trainer, pl_module: LightningModule, only_missing: bool = False) -> None:
        """Write the final adapter and merged model; a collective.

        Args:
            trainer: trainer of the run.
            pl_module: the trained module.
            only_missing: write nothing if all folders exist already.
        """
        if only_missing:
            missing = [folder for folder in self._folders(pl_module, find_model(pl_module)) if not folder.exists()]
            if not trainer.strategy.broadcast(bool(missing)):
                return
        self._write(trainer, pl_module, "")

    def _write_best(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.on_best and (best := _best(trainer)) != self._best:
            self._best = best
            self._write_on_the_way(trainer, pl_module, "best-step-")

    def _write_on_the_way(self, trainer: Trainer, pl_module: LightningModule, name: str) -> None:
        # The random numbers of training must not depend on whether models are written.
        undisturbed = torch.random.fork_rng(devices=[])
        with writing(trainer, "AdapterMerger"), undisturbed, weights_that_answer(trainer, pl_module):
            try:
                self._write(trainer, pl_module, f"-{name}{trainer.global_step}")
                for folder in (self.adapter_dir, self.merged_dir):
                    if folder is not None and trainer.is_global_zero and folder.parent.is_dir():
                        keep_newest(folder.parent, f"{folder.name}-{name}", self.keep_last)
            except (MergeFailed, OSError, ValueError) as error:
                rank_zero_warn(f"AdapterMerger: step {trainer.global_step} is not written: {error}")

    def _write(self, trainer: Trainer, pl_module: LightningModule, suffix: str) -> None:
        model, tokenizer, strategy = find_model(pl_module), _saved_tokenizer(pl_module), trainer.strategy
        if self._would_replace_trained(trainer, self._folders(pl_module, model, suffix)):
            return
        writes, state = trainer.is_global_zero, None
        if isinstance(strategy, WritesModelFolder) and not is_peft(model) and model is not pl_module:
            self._write_sharded(trainer, pl_module, model, strategy.save_pretrained, suffix)
            return
        reshard(pl_module)
        full_model = model
        if is_split(model) or isinstance(strategy, GathersWeights):
            gather = strategy.full_weights if isinstance(strategy, GathersWeights) else full_weights
            state = gather(model, _is_of_adapter, keep=writes)
            full_model = unsplit(model, keep=writes, gather=gather) if self.merged_dir is not None else None
        if not writes:
            return
        if is_peft(model) or model is pl_module:
            folder = self.adapter_dir.with_name(self.adapter_dir.name + suffix)
            write = _adapter_writer(pl_module, model)
            write = write if state is None else partial(write, state_dict=state)
            save_adapter(model, folder, tokenizer, self.texts("adapter", trainer, pl_module), write)
            rank_zero_info(f"adapter: {folder}")
        if self.merged_dir is not None:
            folder = self.merged_dir.with_name(self.merged_dir.name + suffix)
            save_merged(full_model, folder, tokenizer, texts=self.texts("merged", trainer, pl_module))
            rank_zero_info(f"merged model: {folder}")

    def _write_sharded(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        model: "PreTrainedModel",
        save_sharded: Callable[..., None],
        suffix: str,
    ) -> None:
        """Let each rank write its part of a fully fine-tuned model; rank 0 moves the finished folder into place."""
        if self.merged_dir is None:
            return
        folder = self.merged_dir.with_name(self.merged_dir.name + suffix)
        texts: Mapping[str, str] = {}
        with failing_together():  # before the first collective, for which the others would wait
            check_replaceable(folder)
            files = BaseFiles.of(model)
            if files is not None:
                files.publish_names_of(model)
            if trainer.is_global_zero:
                texts = self.texts("merged", trainer, pl_module)
                recover(folder)
                folder.parent.mkdir(parents=True, exist_ok=True)

        def write(temporary: Path) -> None:
            save_sharded(model, temporary)
            add_files(temporary, files, model, _saved_tokenizer(pl_module))

        with failing_together():
            if trainer.is_global_zero:
                write_atomically(folder, write, None, texts)
            else:
                save_sharded(model)
        rank_zero_info(f"merged model: {folder}, a part by each rank")


def _no_texts(*_: object) -> dict[str, str]:
    return {}


def _adapter_writer(module: LightningModule, model: Any) -> Callable[..., object]:
    return module.save_adapter if isinstance(module, SavesAdapter) else partial(write_adapter, model)


def _warn_of_what_is_not_written(module: LightningModule) -> None:
    written, *others = find_models(module) or [""]
    if others:
        rank_zero_warn(
            f"AdapterMerger writes {written!r}, and not {', '.join(map(repr, others))}, which is trained too; save "
            f"it in on_train_end of {type(module).__name__}"
        )
    if (tokenizer := tokenizer_of(module)) is not None and _saved_tokenizer(module) is None:
        rank_zero_warn(
            f"AdapterMerger writes no tokenizer: {type(tokenizer).__name__} has no method save_pretrained; give one of "
            "transformers, or write it by texts="
        )


def _is_of_adapter(name: str, tensor: Tensor) -> bool:
    """Whether a weight or buffer is written with an adapter: PEFT writes the buffers of modules that it saves whole."""
    return tensor.requires_grad or (".modules_to_save." in name and not isinstance(tensor, nn.Parameter))


def _saved_tokenizer(module: LightningModule) -> "PreTrainedTokenizerBase | None":
    tokenizer = tokenizer_of(module)
    return tokenizer if isinstance(tokenizer, WritesFolder) else None


def _monitored(trainer: Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if is_a(c, ModelCheckpoint) and c.monitor is not None]


def _best(trainer: Trainer) -> list[tuple[str, Tensor | None]]:
    """Path and score of each best checkpoint; a better one may have the same path, and is known by its score."""
    return [(callback.best_model_path, callback.best_model_score) for callback in _monitored(trainer)]
