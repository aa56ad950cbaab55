"""The folder of a run: its name, what lies where in it."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lit_ft.errors import RecipeError

RUNS = Path("checkpoints/runs")


@dataclass(frozen=True)
class RunFolder:
    """Everything of a run lies under ``root``."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved recipe; ``fit --config`` takes it."""
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Lightning checkpoints: trainable weights, optimiser, loops."""
        return self.root / "checkpoints"

    @property
    def adapter(self) -> Path:
        """For ``peft.PeftModel.from_pretrained``."""
        return self.root / "adapter"

    @property
    def merged(self) -> Path:
        """For ``transformers.AutoModelForCausalLM.from_pretrained``."""
        return self.root / "merged"

    def last_checkpoint(self) -> Path:
        """The newest ``last*.ckpt``, which ``--ckpt_path last`` names.

        Raises:
            RecipeError: there is none.
        """
        found = sorted(self.checkpoints.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise RecipeError(f"there is no last.ckpt in {self.checkpoints}; start without --ckpt_path, or name a file")
        return found[-1]

    def make(self, resuming: bool) -> None:
        """Create the folder.

        Raises:
            RecipeError: it cannot be written, or holds another run that would be overwritten.
        """
        if not resuming and self.config.exists():
            raise RecipeError(
                f"run_dir={str(self.root)!r} holds a run already; resume it with --ckpt_path last, "
                "or give another --run_dir"
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RecipeError(
                f"run_dir={str(self.root)!r} cannot be written ({error.strerror}); give another one with --run_dir DIR"
            ) from error


def new_run(recipe: str) -> RunFolder:
    """``checkpoints/runs/<recipe>/<time>``."""
    return RunFolder(RUNS / recipe / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))


def newest_run(recipe: str) -> RunFolder:
    """The recipe's newest run that has a checkpoint to resume from.

    Raises:
        RecipeError: there is none.
    """
    runs = sorted((RUNS / recipe).glob("*/checkpoints/last*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise RecipeError(
            f"no run of {recipe!r} under {RUNS / recipe} has a last.ckpt; give its folder with --run_dir DIR"
        )
    return RunFolder(runs[-1].parents[1])
