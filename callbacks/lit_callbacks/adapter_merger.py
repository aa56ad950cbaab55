"""Write what training made as folders that Hugging Face tools load."""

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_callbacks.merge_check import check_files, compare, logits_of, sample_ids


class AdapterMerger(Callback):
    """At the end of training, write the adapter and, if asked to, the merged model.

    The module must hold a ``peft.PeftModel`` or, for full fine-tuning, a
    ``transformers.PreTrainedModel`` somewhere; its ``tokenizer``, where it has one, is saved with the
    weights. Folders appear whole or not at all.
    """

    def __init__(self, adapter_dir: str | Path, merged_dir: str | Path | None = None) -> None:
        """Choose where to write.

        Args:
            adapter_dir: folder for ``PeftModel.from_pretrained``; not written in full fine-tuning.
            merged_dir: folder for ``AutoModelForCausalLM.from_pretrained``; None does not merge.
        """
        self.adapter_dir = Path(adapter_dir)
        self.merged_dir = None if merged_dir is None else Path(merged_dir)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the folders, on rank 0."""
        if not trainer.is_global_zero:
            return
        model, tokenizer = find_model(pl_module), getattr(pl_module, "tokenizer", None)
        if is_peft(model):
            save_adapter(model, self.adapter_dir, tokenizer)
            rank_zero_info(f"adapter: {self.adapter_dir}")
        if self.merged_dir is not None:
            save_merged(model, self.merged_dir, tokenizer)
            rank_zero_info(f"merged model: {self.merged_dir}")


def find_model(module: nn.Module) -> Any:
    """The ``PeftModel`` within a module, else its ``PreTrainedModel``.

    Raises:
        ValueError: it holds neither.
    """
    from transformers import PreTrainedModel

    for wanted in (is_peft, lambda m: isinstance(m, PreTrainedModel)):
        for candidate in module.modules():
            if wanted(candidate):
                return candidate
    raise ValueError(f"{type(module).__name__} holds no peft.PeftModel and no transformers.PreTrainedModel to save")


def is_peft(model: nn.Module) -> bool:
    """Whether a module is a ``PeftModel``; False where peft is not installed."""
    try:
        from peft import PeftModel
    except ModuleNotFoundError:
        return False
    return isinstance(model, PeftModel)


def save_adapter(model: Any, folder: Path, tokenizer: Any = None) -> None:
    """Write a ``PeftModel``'s adapter, with the tokenizer, for ``PeftModel.from_pretrained``."""
    _write_whole(folder, lambda temporary: model.save_pretrained(temporary), tokenizer)


def save_merged(model: Any, folder: Path, tokenizer: Any = None, dtype: torch.dtype | None = None) -> None:
    """Write a model with its adapter merged, for ``AutoModelForCausalLM.from_pretrained``.

    The model itself is left as it is: a copy on the CPU is merged. Before the folder appears, the copy's logits on
    some prompts are compared with those before merging, and the files are read back.

    Args:
        model: a ``PeftModel`` or ``PreTrainedModel``.
        folder: where to; an earlier folder there is replaced.
        tokenizer: saved with it, chat template included.
        dtype: of the saved weights; None keeps theirs.

    Raises:
        ValueError: the tuning method cannot be merged, or the base is quantised.
        MergeFailed: the merged model is not the trained one; nothing is left in ``folder``'s place.
    """
    if is_peft(model):
        _check_mergeable(model)
        merged = _merge(model, dtype, tokenizer)
    else:
        merged = model if dtype in (None, model.dtype) else copy.deepcopy(model).to(dtype)

    def write(temporary: Path) -> None:
        merged.save_pretrained(temporary)
        check_files(temporary, merged)

    _write_whole(folder, write, tokenizer)


def _merge(model: Any, dtype: torch.dtype | None, tokenizer: Any) -> Any:
    merged = copy.deepcopy(model).cpu().eval()
    base = merged.get_base_model()
    if base.config._attn_implementation not in ("eager", "sdpa"):
        base.set_attn_implementation("sdpa")  # attention of a device or of a training loop, which takes other arguments
    ids = sample_ids(base, tokenizer)
    wanted = logits_of(merged, ids)
    merged = merged.merge_and_unload(safe_merge=True)
    merged = merged.to(dtype) if dtype is not None else merged
    rank_zero_info(f"merge verified: {compare(wanted, logits_of(merged, ids), merged.dtype)}")
    return merged


def _check_mergeable(model: Any) -> None:
    if not hasattr(model.base_model, "merge_and_unload"):
        method = model.active_peft_config.peft_type.value
        raise ValueError(f"{method} adds no weights that could be merged into the base; use the adapter as it is")
    if getattr(model.get_base_model(), "is_quantized", False):
        raise ValueError("the base is quantised; merge the adapter into the unquantised base model instead")


def _write_whole(folder: Path, write: Callable[[Path], None], tokenizer: Any) -> None:
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
