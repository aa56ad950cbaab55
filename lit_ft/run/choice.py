"""Choice of the run folder and of the checkpoint that a command takes, the same on all ranks."""

import os
from datetime import timedelta
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.constants import default_pg_timeout

from lit_ft.checkpointing.selection import check_resumable
from lit_ft.checkpointing.storage.integrity import check_on_rank_zero
from lit_ft.errors import RecipeError
from lit_ft.run.folder import BEST, LAST, RunFolder, new_run, newest_run, unfinished_run
from lit_ft.run.launching import from_rank_zero, meet

RUN_DIR_VARIABLE = "LIT_FT_RUN_DIR"
"""Environment variable that passes the chosen run folder to the processes that Lightning starts."""
CHECKPOINT_VARIABLE = "LIT_FT_CKPT_PATH"
"""Environment variable that passes them the chosen checkpoint; empty if there is none."""


def forget() -> None:
    """Let the next run in this process choose for itself."""
    for variable in (RUN_DIR_VARIABLE, CHECKPOINT_VARIABLE):
        os.environ.pop(variable, None)


class RunChoice:
    """Run folder and checkpoint by the options of a command."""

    def __init__(self, subcommand: str, options: Namespace, recipe: str) -> None:
        """Check that the options do not contradict each other.

        Args:
            subcommand: fit, validate, test or predict.
            options: its options.
            recipe: name of the recipe, for the folders that are chosen without ``run_dir``.

        Raises:
            RecipeError: a path is empty, ``resume`` is given to a command that does not resume, or beside a
                checkpoint, or a ``fast_dev_run``, which saves no checkpoint, would replace what a run has written.
        """
        self._subcommand, self._options, self._recipe = subcommand, options, recipe
        self._resumes = options.ckpt_path in (LAST, BEST)
        for name in ("run_dir", "ckpt_path"):
            if (value := options[name]) is not None and not value.strip():
                raise RecipeError(f"{name}={value!r} names nothing; leave it out, or give a path")
        resuming = "ckpt_path" if options.ckpt_path is not None else "resume"
        if subcommand == "fit" and options.trainer.fast_dev_run and (value := options[resuming]) is not None:
            raise RecipeError(
                f"trainer.fast_dev_run={options.trainer.fast_dev_run} tries a few batches and saves no checkpoint, so "
                f"it goes on with no run ({resuming}={value}); leave one out, and give a new --run_dir to fast_dev_run"
            )
        if options.resume is None:
            return
        if subcommand != "fit":
            raise RecipeError(f"resume=auto is for fit; name a checkpoint of {subcommand} with --ckpt_path")
        if options.ckpt_path is not None:
            raise RecipeError(
                f"resume=auto chooses a checkpoint, and so does ckpt_path={options.ckpt_path!r}; leave one out"
            )

    def run_dir(self) -> str | None:
        """Run folder that the options or the process that started this one name; None if it is to be chosen."""
        named: str | None = self._options.run_dir
        return os.environ.get(RUN_DIR_VARIABLE) if named is None and "LOCAL_RANK" in os.environ else named

    def folder(self) -> RunFolder:
        """Run folder: the one that is named, the one that the recipe's file lies in, or one that is chosen."""
        run_dir = self.run_dir()
        nodes, timeout = self._options.trainer.num_nodes, self._timeout()
        if run_dir is not None:
            meet(nodes, timeout)
        else:
            run_dir = from_rank_zero(lambda: str(self._choose_run().root), nodes, timeout)
        for file in self._options.config or []:
            if (here := RunFolder.of_config(Path(str(file)), run_dir)) is not None:
                rank_zero_info(
                    f"{file} names the run folder {run_dir}; the folder that it lies in is used: {here.root}"
                )
                run_dir = str(here.root)
        os.environ[RUN_DIR_VARIABLE] = run_dir
        return RunFolder(Path(run_dir))

    def checkpoint(self, folder: RunFolder) -> str | None:
        """Checkpoint of the run folder that the options name, the same on all ranks; None where there is none."""
        path = self._chosen_checkpoint(folder)
        if path is not None and self._subcommand == "fit":
            check_resumable(Path(path))
        return path

    def _chosen_checkpoint(self, folder: RunFolder) -> str | None:
        path: str | None = self._options.ckpt_path
        if not self._resumes and self._options.resume is None:
            if path is not None:
                check_on_rank_zero(folder.chosen_checkpoint(path))
            return path
        if "LOCAL_RANK" in os.environ and CHECKPOINT_VARIABLE in os.environ:
            return os.environ[CHECKPOINT_VARIABLE] or None
        nodes, timeout = self._options.trainer.num_nodes, self._timeout()
        chosen = from_rank_zero(lambda: self._look_for_checkpoint(folder), nodes, timeout)
        os.environ[CHECKPOINT_VARIABLE] = chosen
        return chosen or None

    def _choose_run(self) -> RunFolder:
        if self._resumes:
            return newest_run(self._recipe)
        max_time = self._options.trainer.max_time
        unfinished = unfinished_run(self._recipe, max_time) if self._options.resume is not None else None
        return unfinished or new_run(self._recipe, create=self._subcommand in ("fit", "predict"))

    def _look_for_checkpoint(self, folder: RunFolder) -> str:
        if self._options.resume is not None and not folder.has_checkpoint:
            rank_zero_info(f"resume=auto: no checkpoint in {folder.checkpoints} yet, so the run starts")
            return ""
        path = folder.chosen_checkpoint(self._options.ckpt_path or LAST)
        if self._options.resume is not None:
            rank_zero_info(f"resume=auto: resuming {path}")
        return str(path)

    def _timeout(self) -> timedelta:
        """Timeout for waits between ranks: that of the recipe's strategy, or PyTorch's."""
        strategy = self._options.trainer.strategy
        timeout = strategy.get("init_args", Namespace()).get("timeout") if isinstance(strategy, Namespace) else None
        return timeout if isinstance(timeout, timedelta) else default_pg_timeout
