"""The next command after a run: export, chat or validation, whichever its files allow."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lit_callbacks.export.manifest import MANIFEST

from lit_ft.checkpointing.selection import Best, Candidate, best_known, candidates
from lit_ft.data.text_data import TextDataModule
from lit_ft.process import datamodule_of
from lit_ft.run.folder import BEST, LAST, RunFolder
from lit_ft.training.causal_lm import CausalLM
from lit_ft.tuning.compatibility import refusal
from lit_ft.tuning.targets import unmerged


def next_command(run: RunFolder, trainer: Trainer, module: LightningModule) -> str | None:
    """Command that exports, answers or validates with the best checkpoint, or else with the newest.

    Args:
        run: folder of the run.
        trainer: trainer of the run.
        module: trained module.

    Returns:
        Command line; None without checkpoint and adapter, or where there is nothing to do with them.
    """
    readable, _ = candidates(run.checkpoints)
    writes = isinstance(module, CausalLM) and module.spec.base.head == "logits"
    if not readable:
        return f"python -m lit_ft chat {shlex.quote(str(run.adapter))}" if writes and run.adapter.is_dir() else None
    known = best_known(run.checkpoints)
    best, name = (known[0], BEST) if len(known) == 1 else (None, LAST)
    if isinstance(module, CausalLM) and _merges(module) and not _is_merged(run, readable, best):
        chosen = f" --ckpt_path {name}" if name != LAST else ""
        choice = " --quantized-base dequantize" if module.spec.base.is_quantized else ""
        return f"python -m lit_ft export --run {shlex.quote(str(run.root))}{chosen} --merge{choice}"
    data = datamodule_of(trainer)
    config = f"--config {shlex.quote(str(run.config))} --ckpt_path {name}"
    if writes and isinstance(data, TextDataModule):
        return f"python -m lit_ft predict {config}{'' if data.splits.has_questions else ' --data.test_path FILE'}"
    return f"python -m lit_ft validate {config}" if trainer.enable_validation else None


def _is_merged(run: RunFolder, readable: Sequence[Candidate], best: Best | None) -> bool:
    """Whether a merged model has the weights of the best checkpoint, or without one of the newest: it is not older."""
    newest = readable[0]
    of_best = next((one.position for one in readable if best is not None and one.path == best.path), None)
    folders = [(run.exported("merged", BEST), best.path)] if best is not None else []
    if best is None or (of_best is not None and of_best[:2] == newest.position[:2]):
        folders.append((run.merged, newest.path))
    return any(_was_written_after(folder / MANIFEST, path) for folder, path in folders)


def _was_written_after(file: Path, other: Path) -> bool:
    return file.is_file() and other.exists() and file.stat().st_mtime_ns >= other.stat().st_mtime_ns


def _merges(module: CausalLM) -> bool:
    peft = module.spec.tuning.peft
    return peft is None or (refusal(peft, "merge") is None and unmerged.reason(module) is None)
