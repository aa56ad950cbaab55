"""What a contestant is given and what it hands back, as JSON files, so that each can run in its own environment.

python -m benchmarks.peers.RUNNER job.json result.json
"""

import json
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
"""Of AdamW; constant, without clipping."""

LORA: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
"""As recipes/qwen.yaml has it, without the dropout: with it, no two losses could be compared."""


@dataclass(frozen=True)
class Job:
    """One run of a contestant."""

    model: str
    """Folder with weights in bf16 and a tokenizer, in Hugging Face's format."""
    rows: str
    """JSON list of rows of ``input_ids`` and ``labels`` (unshifted, -100 where not supervised), in training order."""
    micro_batch_size: int
    accumulate: int
    device: str
    """``cpu`` or ``cuda``."""
    max_length: int
    """Tokens of the longest row that the recipe allows."""
    folder: str = ""
    """For what the contestant writes."""
    started: float = 0.0
    """``time.monotonic()`` when the process was asked for."""
    options: dict[str, Any] = field(default_factory=dict)
    """The contestant's own settings."""
    lora: dict[str, Any] = field(default_factory=lambda: dict(LORA))
    """Arguments of ``peft.LoraConfig``."""

    def read_rows(self) -> list[dict[str, list[int]]]:
        """The rows, each with ``input_ids`` and ``labels``."""
        rows: list[dict[str, list[int]]] = json.loads(Path(self.rows).read_text(encoding="utf-8"))
        return rows

    def write(self, path: Path) -> None:
        """For the process to come."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass
class Measured:
    """What a run came to."""

    ends: list[float] = field(default_factory=list)
    """``time.monotonic()`` at the end of each optimizer step."""
    losses: list[float] = field(default_factory=list)
    """Of each optimizer step."""
    tokens: list[int] | None = None
    """Tokens of each optimizer step, padding left out; None where steps have the samples that the job says."""
    note: str = ""
    """What a reader of the table must know about this run, e.g. that losses are rounded."""
    preparing_seconds: float = 0.0
    """That went into what is done once and kept, such as weights in another format."""
    peak_memory_bytes: int = 0
    """Until the end of the last step: the process's largest resident size; on CUDA what PyTorch had allocated."""
    file_page_bytes: int = 0
    """Of the resident size at the end of the last step: pages of mapped files, which the system may take back."""

    def __post_init__(self) -> None:
        """On CUDA, steps end by events, so that nobody has to wait for the device."""
        self._events: list[Any] = []

    def step_ended(self) -> None:
        """Note time and memory."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            self.peak_memory_bytes, self.file_page_bytes = _resident_memory()
            self.ends.append(time.monotonic())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        if not self.ends:
            torch.cuda.synchronize()
            self.ends.append(time.monotonic())

    def finish(self) -> None:
        """Turn events into times."""
        if self._events:
            torch = sys.modules["torch"]
            torch.cuda.synchronize()
            self.ends = [self.ends[0] + self._events[0].elapsed_time(event) / 1e3 for event in self._events]
            self.peak_memory_bytes = torch.cuda.max_memory_allocated()

    def prepare(self, make: Callable[[], T]) -> T:
        """Do what is done once and kept; its seconds are nobody's start."""
        started = time.monotonic()
        made = make()
        self.preparing_seconds += time.monotonic() - started
        return made


def serve(run: Callable[[Job], Measured]) -> None:
    """Read the job that the command line names, run it, write what it came to."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    measured = run(job)
    measured.finish()
    seconds = measured.ends[0] - job.started - measured.preparing_seconds
    result = {**asdict(measured), "seconds_to_first_step": seconds}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def _resident_memory() -> tuple[int, int]:
    """High-water mark of this process's resident size, and how much of the present one is pages of mapped files."""
    status = Path("/proc/self/status")
    if not status.is_file():  # a Mac, where ru_maxrss counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    # Not ru_maxrss: that one counts what the parent held when it started this process, too.
    fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
    peak, pages = (int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile"))
    return peak, pages
