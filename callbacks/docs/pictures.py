"""The README's pictures, from a small run: ``python callbacks/docs/pictures.py [FOLDER]``, about half a minute.

A character model learns the general text that comes with ``ForgettingProbe``, then facts of one form. Among the facts
are two that come twice, three that are noise, and one whose loss is a million times too large.
"""

import logging
import random
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lit_callbacks import ForgettingProbe, LossLedger, RunReport, SampleGenerations, SpikeGuard
from lit_callbacks.evaluation.forgetting_probe import GENERAL_TEXT
from lit_callbacks.loss_ledger.ledger_files import read_visits
from lit_callbacks.output.step_lines import read_lines
from lit_callbacks.report.report_data import RunData, read_run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

END = "\n"
GENERAL = GENERAL_TEXT.read_text(encoding="utf-8")
ALPHABET = sorted({END, *GENERAL, *string.ascii_letters, *string.digits})
NAMES = "Alma Bruno Clara Dario Edda Falk Greta Hugo Ida Jonas Karla Leo Mona Nils Olga Paul".split()
TOWNS = "Aachen Basel Calais Dover Essen Genoa Hull Ibiza Jena Kiel Lyon Malta".split()


class Letters(LightningModule):
    """A recurrent network that predicts the next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 32)
        self.memory = nn.GRU(32, 128, batch_first=True)
        self.head = nn.Linear(128, len(ALPHABET))

    def encode(self, text: str) -> Tensor:
        return torch.tensor([ALPHABET.index(letter) for letter in text])

    def losses(self, ids: Tensor) -> Tensor:
        """Loss of each letter but the first, ``(samples, letters - 1)``; 0 after the first END."""
        logits = self.head(self.memory(self.embedding(ids))[0])
        losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return losses * ((ids[:, :-1] == 0).cumsum(1) == 0)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        losses = self.losses(batch["letters"])
        loss = (losses.mean(1) * batch["weight"]).mean()
        self.log("train/loss", loss)
        return {"loss": loss, "token_losses": losses}

    def text_loss(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        return sum((self.losses(self.encode(t)[None]).sum() for t in texts), torch.zeros(())), sum(map(len, texts))

    def answer(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        return [self._continue(prompt, max_new_tokens) for prompt in prompts]

    def _continue(self, text: str, letters: int) -> str:
        found = ""
        while len(found) < letters and not found.endswith(END):
            hidden = self.memory(self.embedding(self.encode(text + found)[None]))[0][0, -1]
            found += ALPHABET[int(self.head(hidden).argmax())]
        return found.strip()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def facts() -> dict[str, str]:
    """Facts by id; see the module's docstring."""
    draw = random.Random(0)
    places = [f"{name} lives in {draw.choice(TOWNS)} at {draw.randrange(10**6)}." for name in NAMES * 4]
    found = {f"fact {i}": place for i, place in enumerate(places)}
    found |= {f"copy of {i}": found[f"fact {i}"] for i in (11, 37)}
    return found | {f"noise {i}": "".join(draw.choices(ALPHABET[1:], k=30)) for i in range(3)}


def batches(module: Letters, texts: dict[str, str], spike: int | None) -> DataLoader:
    ids = nn.utils.rnn.pad_sequence([module.encode(text + END) for text in texts.values()], batch_first=True)
    rows: Any = [{"letters": one, "weight": 1.0, "id": name} for one, name in zip(ids, texts, strict=True)]
    if spike is not None:
        rows[spike]["weight"] = 1e6
    return DataLoader(rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))


def run(folder: Path, guarded: bool) -> None:
    """Learn general text, then the facts with all callbacks, or all but the guard."""
    seed_everything(0, verbose=False)
    module = Letters()
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet["enable_checkpointing"] = False
    pieces = {str(i): GENERAL[i : i + 64] for i in range(0, len(GENERAL) - 64, 8)}
    Trainer(**quiet, max_epochs=6, logger=False).fit(module, batches(module, pieces, None))
    watching: list[Any] = [LossLedger(texts=lambda ids: facts()), ForgettingProbe(every_n_steps=10)]
    # The same callback tells how well the facts are known.
    watching += [ForgettingProbe(list(facts().values())[: len(NAMES)], every_n_steps=10, path=folder / "facts.jsonl")]
    watching += [SampleGenerations(["Olga lives in ", "Rivers carry "], every_n_steps=60, max_new_tokens=40)]
    guard = [SpikeGuard(warmup_steps=5)] if guarded else []
    logger = CSVLogger(folder, name="", version="")
    options = {"max_epochs": 12, "log_every_n_steps": 1, "default_root_dir": folder, "gradient_clip_val": 1e9}
    trainer = Trainer(**quiet, **options, logger=logger, callbacks=[*guard, *watching, RunReport()])
    trainer.fit(module, batches(module, facts(), spike=5))


def canvas() -> tuple[Figure, Any]:
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("optimizer step")
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=100)
    shrink(path)


def shrink(path: Path) -> None:
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def draw_spike(guarded: Path, bare: Path, out: Path) -> None:
    figure, axes = canvas()
    for folder, label in ((bare, "as it is"), (guarded, "with SpikeGuard")):
        points = [(line["step"], line["loss"]) for line in read_lines(folder / "facts.jsonl")]
        axes.plot(*zip(*points, strict=True), ".-", label=label, linewidth=1)
    axes.set(ylabel="nats per letter of the facts", title="a sample whose loss is a million times too large")
    axes.legend(frameon=False)
    save(figure, out)


def draw_ledger(run: RunData, out: Path) -> None:
    visits = read_visits(run.folder / "loss_ledger")
    twins = {name for pair in run.ledger["twins"][:2] for name in pair["ids"]}
    figure, axes = canvas()
    for name in dict.fromkeys(visit.id for visit in visits):
        points = [(visit.step, visit.loss) for visit in visits if visit.id == name]
        style: dict[str, Any] = {"color": "0.85", "linewidth": 0.6}
        if name in twins or name.startswith("noise"):
            style = {"label": name, "linewidth": 1.4, "linestyle": "--" if name.startswith("noise") else "-"}
        axes.plot(*zip(*points, strict=True), **style)
    axes.set(ylabel="nats per letter", title="loss of each sample: the worst, and duplicates")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    save(figure, out)


def draw_forgetting(run: RunData, out: Path) -> None:
    figure, axes = canvas()
    axes.plot(*zip(*((line["step"], line["loss"]) for line in run.forgetting), strict=True), ".-")
    axes.set(ylabel="nats per letter", title="forgetting/loss: general text, while facts are learnt")
    save(figure, out)


def draw_samples(run: RunData, out: Path) -> None:
    figure, axes = canvas()
    axes.axis("off")
    rows = [[str(line["step"]), line["prompt"], line["answer"]] for line in run.samples]
    table = axes.table(rows, colLabels=["step", "prompt", "answer"], loc="center", cellLoc="left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.auto_set_column_width([0, 1, 2])
    save(figure, out)


def draw_page(run: RunData, out: Path) -> None:
    if (browser := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        print("no Chromium here, so run_report.png stays as it is")
        return
    for name, options in (("run_report", []), ("run_report_night", ["--force-dark-mode"])):
        path = out / f"{name}.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
        command += ["--window-size=800,900", f"--screenshot={path}", (run.folder / "report.html").as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=100)
        shrink(path)


def main(out: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as temporary:
        guarded, bare = Path(temporary) / "facts", Path(temporary) / "unguarded"
        run(guarded, guarded=True)
        run(bare, guarded=False)
        found = read_run(guarded)
        draw_spike(guarded, bare, out / "spike_guard.png")
        draw_ledger(found, out / "loss_ledger.png")
        draw_forgetting(found, out / "forgetting_probe.png")
        draw_samples(found, out / "sample_generations.png")
        draw_page(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
