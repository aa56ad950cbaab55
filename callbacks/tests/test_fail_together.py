"""Two ranks of a plain Lightning run: one raises while the other hangs."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import clean_environment

SCRIPT = """
import time
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lit_callbacks import FailTogether

class Trouble(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 0:
            time.sleep(600)
        time.sleep(1)
        raise ValueError("bad")

if __name__ == "__main__":
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callbacks = [FailTogether(grace_seconds=1, poll_seconds=0.1), Trouble()]
    Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=callbacks, **quiet).fit(BoringModel())
"""


@pytest.mark.processes
def test_a_rank_that_hangs_ends_with_one_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # Each by hand: nobody else ends one of them for the other's sake.
    environment = {**clean_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment, "NODE_RANK": "0", "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        hung, failed = (rank.communicate(timeout=300)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], f"--- rank 0\n{hung}\n--- rank 1\n{failed}"
    assert failed.rstrip().endswith("ValueError: bad")
    assert "rank 0 stops: rank 1 failed: ValueError: bad" in hung
