"""Callback that fails on one rank, for the tests of failures."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback


class Trouble(Callback):
    """Failure on one rank before a step: an error, a kill as by the out-of-memory killer, a stop, or a hang."""

    def __init__(self, kind: str, mark: str, rank: int = 1, step: int = 4) -> None:
        self.kind, self.mark, self.rank, self.step = kind, mark, rank, step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank != self.rank or trainer.global_step != self.step:
            return
        Path(self.mark).touch()
        if self.kind == "raise":
            raise ValueError("the row is bad")
        if self.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        time.sleep(600)
