"""The command that makes something of a run that has ended: one that works for what the run has left."""

import shlex

from lightning.pytorch import LightningModule, Trainer

from lit_ft.checkpointing.selection import best_known
from lit_ft.data.text_data import TextDataModule
from lit_ft.process import datamodule_of
from lit_ft.run.folder import BEST, LAST, RunFolder
from lit_ft.training.causal_lm import CausalLM
from lit_ft.tuning.compatibility import refusal


def next_command(run: RunFolder, trainer: Trainer, module: LightningModule) -> str | None:
    """Command that exports, answers or validates with the best checkpoint, or else with the newest.

    Args:
        run: folder of the run.
        trainer: trainer of the run.
        module: trained module.

    Returns:
        Command line; None without a checkpoint, or where there is nothing to do with it.
    """
    if not run.has_checkpoint:
        return None
    name = BEST if len(best_known(run.checkpoints)) == 1 else LAST
    if isinstance(module, CausalLM) and not run.merged.exists() and _merges(module):
        chosen = f" --ckpt_path {name}" if name != LAST else ""
        choice = " --quantized-base dequantize" if module.spec.base.is_quantized else ""
        return f"python -m lit_ft export --run {shlex.quote(str(run.root))}{chosen} --merge{choice}"
    data = datamodule_of(trainer)
    config = f"--config {shlex.quote(str(run.config))} --ckpt_path {name}"
    if isinstance(module, CausalLM) and isinstance(data, TextDataModule):
        return f"python -m lit_ft predict {config}{'' if data.splits.has_questions else ' --data.test_path FILE'}"
    return f"python -m lit_ft validate {config}" if trainer.enable_validation else None


def _merges(module: CausalLM) -> bool:
    peft = module.spec.tuning.peft
    return peft is None or refusal(peft, "merge") is None
