"""A warm training step reads no tensor's value, for which the host would wait for a GPU.

On a CPU the same operators run, and nothing waits: the reads are counted, with the line that makes each. ``pytest -m
cuda`` lets CUDA itself object.
"""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lit_callbacks import GracefulStop, LossLedger, SpikeGuard, ThroughputMonitor
from peft import LoraConfig
from preference_pairs import write_pairs
from ranks import LiveRanks
from shared_fixtures import silent_trainer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lit_ft import CausalLM, PreferenceLM, TextDataModule
from lit_ft.data.text.sources import Source
from lit_ft.strategies import FSDPStrategy

pytestmark = pytest.mark.processes

READS = (Tensor.tolist, Tensor.cpu, Tensor.numpy)
"""Methods that copy to the host without an operator that shows it on a CPU. ``torch.tensor(number, device=...)`` copies
from it, and waits too."""
WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "aten::equal", "c10d::barrier")
"""Parts of the names of operators whose result or shape the host reads; NCCL's barrier blocks it."""
EXPECTED = {
    "lit_ft/training/finite.py": "on a CPU at once; from a GPU it is copied meanwhile, and read one step later",
    "lit_ft/packed_batch.py": "batches are collated in host memory",
    "lit_ft/training/metrics.py": "for the progress bar, as in finite.py",
    "torch/optim/optimizer.py": "counters of steps are in host memory, also those of weights on a GPU",
}
ON_RANKS = {"lit_callbacks/lifecycle/graceful_stop.py": "as in finite.py"}
"""Files that read a value, with the reason why no GPU is waited for."""
GUARD = "lit_callbacks/stability/spike_guard.py"
"""File that waits once in a step, before the optimizer: it decides whether the step is taken."""
Found = dict[str, int]


class Reads:
    """Number of values that the host reads between ``enter`` and ``leave``, by the file that reads them."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        function, dispatch = self._function_mode(), self._dispatch_mode()
        self._modes = (function, dispatch)

    def enter(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def leave(self) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)

    def _note(self) -> None:
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))  # innermost first
        own = (name for name in files if name not in (__file__, traceback.__file__))
        place = next(name for name in own if "/torch/" not in name or "/torch/optim/" in name)
        parts = Path(place).parts[-3:]
        self.files["/".join(parts[1:] if parts[1] == "lit_ft" else parts)] += 1

    def _function_mode(self) -> TorchFunctionMode:
        note = self._note

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                copies = func is torch.tensor and (kwargs or {}).get("device") is not None
                if func in READS or copies:
                    note()
                return func(*args, **(kwargs or {}))

        return Functions()

    def _dispatch_mode(self) -> TorchDispatchMode:
        note = self._note

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(name in func._schema.name for name in WAITS):
                    note()
                return func(*args, **(kwargs or {}))

        return Operators()


class CountReads(Callback):
    """Counts the reads from the end of the second optimizer step to that of the third, of two micro-batches."""

    def __init__(self) -> None:
        self.reads = Reads()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.reads.enter()
        elif batch_idx == 5:
            self.reads.leave()


def reads_of_a_warm_step(
    folder: str, data: list[Source], out: str, guard: bool = False, module: type[CausalLM] = CausalLM, **options: Any
) -> Found:
    count = CountReads()
    callbacks = [GracefulStop(), ThroughputMonitor(), LossLedger(Path(out) / "ledger"), count]
    callbacks += [SpikeGuard()] if guard else []
    run = {"max_steps": 4, "accumulate_grad_batches": 2, "log_every_n_steps": 50, "gradient_clip_val": 1.0}
    trainer = silent_trainer(**run, callbacks=callbacks, default_root_dir=out, **options)
    model = module(folder, peft=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer.fit(model, TextDataModule(sources=data, micro_batch_size=2))
    assert {"train/loss/one", "train/loss/two"} <= trainer.callback_metrics.keys()
    return dict(count.reads.files)


def on_two(strategy: Any, *arguments: Any) -> Found:
    return reads_of_a_warm_step(*arguments, strategy=strategy(), devices=2)


@pytest.fixture
def sources(write_rows: Any) -> list[Source]:
    """Two sources, each with a loss curve of its own."""
    return [Source(write_rows(name=f"{name}.json"), name=name) for name in ("one", "two")]


@pytest.mark.parametrize("guard", [False, True])
def test_one_device(guard: bool, model_folder: str, sources: list[Source], tmp_path: Path) -> None:
    found = reads_of_a_warm_step(model_folder, sources, str(tmp_path), guard)
    assert found.pop("lit_ft/training/finite.py", 0) == (0 if guard else 2)  # the counter counts
    assert found.pop(GUARD, 0) == guard
    assert found["lit_ft/training/metrics.py"] == 2  # loss and learning rate
    assert not set(found) - set(EXPECTED)


def test_pairs_on_one_device(model_folder: str, tmp_path: Path) -> None:
    path = write_pairs(tmp_path)
    sources = [Source(path, name=name, format="preference") for name in ("one", "two")]
    found = reads_of_a_warm_step(model_folder, sources, str(tmp_path), module=PreferenceLM)
    assert found["lit_ft/training/metrics.py"] == 4  # reward accuracy and margin too
    assert not set(found) - set(EXPECTED)


@pytest.mark.parametrize(("strategy", "guard"), [(DDPStrategy, True), (FSDPStrategy, False)])
def test_two_ranks(
    strategy: Any, guard: bool, live_ranks: LiveRanks, model_folder: str, sources: list[Source], tmp_path: Path
) -> None:
    for found in live_ranks(2, on_two, strategy, model_folder, sources, str(tmp_path), guard):
        assert found["lit_callbacks/lifecycle/graceful_stop.py"] == 1
        assert found.pop(GUARD, 0) == guard
        assert found["lit_ft/training/metrics.py"] == 2
        assert not set(found) - set(EXPECTED) - set(ON_RANKS)
