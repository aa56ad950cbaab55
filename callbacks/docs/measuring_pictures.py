"""The README's pictures of ThroughputMonitor, MemoryProfiler and AdapterMerger, from a small run.

``python callbacks/docs/measuring_pictures.py [FOLDER]``, a few seconds; wants the extras ``peft`` and ``plots``.
"""

import csv
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lit_callbacks import AdapterMerger, MemoryProfiler, ThroughputMonitor
from lit_callbacks.throughput.throughput_monitor import PARTS
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader

COLORS = ["#4c78a8", "#e45756", "#54a24b", "#f58518", "#9d9da1"]
VOCABULARY = 2000


class Adapted(LightningModule):
    """LoRA on a small Llama with random weights."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
        self.model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=3e-3)


def padded(count: int) -> DataLoader:
    """Samples of 24 to 64 tokens in batches of 8, the first third of each without labels."""
    rows = []
    for _ in range(count):
        length = int(torch.randint(24, 65, ()))
        ids, mask = torch.randint(0, VOCABULARY // 20, (64,)), (torch.arange(64) < length).long()
        labels = torch.where((mask == 1) & (torch.arange(64) >= length // 3), ids, -100)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return DataLoader(rows, batch_size=8)


def run(folder: Path) -> None:
    seed_everything(0, verbose=False)
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=1,
        val_check_interval=20,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[
            ThroughputMonitor(window=4),
            MemoryProfiler(folder / "memory"),
            AdapterMerger(folder / "adapter", folder / "merged", every_n_steps=20, on_best=True, keep_last=2),
            ModelCheckpoint(folder / "checkpoints", monitor="val/loss"),
        ],
    ).fit(Adapted(), padded(640), padded(16))


def logged(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "throughput/step_seconds" in row]


def draw_throughput(rows: list[dict[str, float]], path: Path) -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    FigureCanvasAgg(figure)
    rates, parts = figure.subplots(1, 2)
    steps = [row["step"] + 1 for row in rows]
    for name in ("total", "non_padding", "supervised"):
        values = [row[f"throughput/{name}_tokens_per_second"] for row in rows]
        rates.plot(steps, values, label=name.replace("_", " "))
    rates.set(title="tokens per second", xlabel="optimizer step", ylim=(0, None))
    taken = [name for name in PARTS if f"throughput/step_seconds/{name}" in rows[0]]
    milliseconds = [[row[f"throughput/step_seconds/{name}"] * 1e3 for row in rows] for name in taken]
    parts.stackplot(steps, milliseconds, labels=[name.replace("_", "+") for name in taken], colors=COLORS)
    parts.set(title="milliseconds of a step", xlabel="optimizer step")
    for axes in (rates, parts):
        axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=90)


def draw_folders(folder: Path, said: list[str], path: Path) -> None:
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axis("off")
    found = sorted((p for p in folder.iterdir() if p.name.startswith(("adapter", "merged"))), key=lambda p: p.name)
    sizes = [sum(file.stat().st_size for file in one.rglob("*") if file.is_file()) / 2**20 for one in found]
    lines = [f"{one.name + '/':28}{size:7.2f} MiB" for one, size in zip(found, sizes, strict=True)]
    lines += ["", *[line for line in said if line.startswith("merge verified")][-1:]]
    axes.text(0, 1, "\n".join(lines), family="monospace", fontsize=9, va="top")
    figure.savefig(path, dpi=90)


class Said(logging.Handler):
    """Keeps what Lightning's log says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: Any) -> None:
        self.lines.append(record.getMessage())


def main(out: Path) -> None:
    log, said = logging.getLogger("lightning.pytorch"), Said()
    log.handlers = [said]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(folder)
        draw_throughput(logged(folder), out / "throughput_monitor.png")
        draw_folders(folder, said.lines, out / "adapter_merger.png")
        shutil.copy(folder / "memory" / "memory_timeline.png", out / "memory_profiler.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
