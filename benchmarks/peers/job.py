"""Job and measurements of a contestant, exchanged as JSON files, so that each can run in its own environment.

python -m benchmarks.peers.RUNNER job.json result.json
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
"""Settings of AdamW for all contestants; the learning rate is constant, and gradients are not clipped."""

LORA: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
"""LoRA of recipes/qwen.yaml without dropout, which would make losses incomparable."""

LORA_ALL_LINEAR: dict[str, Any] = {
    **LORA,
    "r": 16,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
"""LoRA on all linear layers of a decoder layer."""


@dataclass(frozen=True)
class Job:
    """One run of a contestant."""

    model: str
    """Folder with weights in bf16 and a tokenizer, in the Hugging Face format."""
    rows: str
    """JSON list of rows of ``input_ids`` and ``labels`` (unshifted, -100 where not supervised), in training order."""
    micro_batch_size: int
    accumulate: int
    device: str
    """``cpu`` or ``cuda``."""
    max_length: int
    """Length limit of a row in tokens."""
    folder: str = ""
    """Folder for the contestant's output."""
    started: float = 0.0
    """``time.monotonic()`` before the start of the process."""
    options: dict[str, Any] = field(default_factory=dict)
    """The contestant's own settings."""
    lora: dict[str, Any] = field(default_factory=lambda: dict(LORA))
    """Arguments of ``peft.LoraConfig``."""

    def read_rows(self) -> list[dict[str, list[int]]]:
        """Read the rows, each with ``input_ids`` and ``labels``."""
        rows: list[dict[str, list[int]]] = json.loads(Path(self.rows).read_text(encoding="utf-8"))
        return rows


@dataclass
class Measured:
    """Measurements of a run."""

    ends: list[float] = field(default_factory=list)
    """``time.monotonic()`` at the end of each optimizer step."""
    processor_ends: list[float] = field(default_factory=list)
    """Seconds that processors have worked for this process, at the end of each optimizer step; empty on CUDA."""
    losses: list[float] = field(default_factory=list)
    """Loss of each optimizer step."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each optimizer step's answers, in policy optimization."""
    tokens: list[int] | None = None
    """Non-padding tokens of each optimizer step, of its answers in policy optimization; None if the steps have the
    job's samples."""
    note: str = ""
    """Note for the reader of the table, e.g. that losses are rounded."""
    preparing_seconds: float = 0.0
    """Seconds of one-time work whose result is kept, such as the conversion of weights."""
    peak_memory_bytes: int = 0
    """Peak until the end of the last step: resident size of the process; on CUDA, memory that PyTorch allocated."""
    file_page_bytes: int = 0
    """Part of the resident size at the end of the last step: pages of mapped files, which the system may drop."""

    def __post_init__(self) -> None:
        """Prepare to time steps; on CUDA by events, without a synchronization."""
        self._events: list[Any] = []

    def step_ended(self) -> None:
        """Record time and memory."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            self.peak_memory_bytes, self.file_page_bytes = _resident_memory()
            self.ends.append(time.monotonic())
            self.processor_ends.append(time.process_time())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        if not self.ends:
            torch.cuda.synchronize()
            self.ends.append(time.monotonic())

    def finish(self) -> None:
        """Convert events to times."""
        if self._events:
            torch = sys.modules["torch"]
            torch.cuda.synchronize()
            self.ends = [self.ends[0] + self._events[0].elapsed_time(event) / 1e3 for event in self._events]
            self.peak_memory_bytes = torch.cuda.max_memory_allocated()

    def prepare(self, make: Callable[[], T]) -> T:
        """Do one-time work whose result is kept; its seconds do not count as start-up time."""
        started = time.monotonic()
        made = make()
        self.preparing_seconds += time.monotonic() - started
        return made


def asked() -> dict[str, Any]:
    """Read the file that the command line names, once it is there; without the process that is to write it, end."""
    path, parent = Path(sys.argv[1]), os.getppid()
    while not path.is_file():
        if os.getppid() != parent:
            sys.exit(f"nothing was asked: {path}")
        time.sleep(0.02)
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def serve(run: Callable[[Job], Measured]) -> None:
    """Read the job that the command line names, run it, and write the measurements."""
    job = Job(**asked())
    measured = run(job)
    measured.finish()
    seconds = measured.ends[0] - job.started - measured.preparing_seconds
    result = {**asdict(measured), "seconds_to_first_step": seconds}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def _resident_memory() -> tuple[int, int]:
    """Peak resident size of this process, and the pages of mapped files in its current one, in bytes."""
    status = Path("/proc/self/status")
    if not status.is_file():  # a Mac, where ru_maxrss counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    # Not ru_maxrss: it includes the memory of the parent process at the start of this one.
    fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
    peak, pages = (int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile"))
    return peak, pages
