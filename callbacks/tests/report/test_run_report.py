"""RunReport: one page about a run, opened by a browser where there is one."""

import csv
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import CHAT, byte_tokenizer
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lit_callbacks import ForgettingProbe, LossLedger, RunReport, SampleGenerations, SpikeGuard
from lit_callbacks.output.step_lines import add_lines
from lit_callbacks.report import report_plots
from lit_callbacks.report.first_batch import describe_batch, write_first_batch
from lit_callbacks.report.headline import headline
from lit_callbacks.report.report_data import read_metrics, read_run
from lit_callbacks.report.report_plots import MOST_POINTS, draw, sort_into_charts, thinned
from lit_callbacks.report.run_report import write_report
from lit_callbacks.report.scored_answers import ScoredAnswer, write_answers
from lit_callbacks.report.tables import ReportTable
from torch import nn
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""


class Plain(LightningModule):
    """Writes things into its answers that must not become part of the page."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.tokenizer = byte_tokenizer()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        losses = (self.layer(batch["x"])[:, 0] - batch["y"]) ** 2
        self.log("train/loss", losses.mean())
        self.log("train/learning_rate", 0.1)
        return {"loss": losses.mean(), "sample_losses": losses}

    def answer(self, prompts: list[str], max_new_tokens: int) -> list[str]:
        return [f"<script>alert('{prompt}')</script> & {self.layer.bias.item():.3f}" for prompt in prompts]

    def text_loss(self, texts: list[str]) -> tuple[float, int]:
        return 2.0 * len(texts), len(texts)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data(count: int = 12) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(count, 3, generator=generator)
    ids = torch.tensor(byte_tokenizer()(CHAT)["input_ids"])
    labels = ids.where(torch.arange(len(ids)) > len(ids) - 5, -100)
    texts = {"input_ids": ids, "labels": labels}
    return DataLoader(
        [{"x": x, "y": x.sum(), "id": f"row-{i}", "source": "<b>", **texts} for i, x in enumerate(xs)], batch_size=2
    )


def fit(folder: Path, callbacks: list[Any], logger: Any, module: Any = None, **options: Any) -> None:
    options = {**QUIET, "max_epochs": 2, **options}
    run = Trainer(**options, default_root_dir=folder, callbacks=callbacks, logger=logger)
    run.fit(module or Plain(), data())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    # The last: what is on the page is what the others have written by then.
    callbacks = [
        SpikeGuard(),
        LossLedger(),
        ForgettingProbe(["x", "y"]),
        SampleGenerations(["Who <i>?"], 5, expected=["You & me"]),
        RunReport(),
    ]
    fit(folder, callbacks, [CSVLogger(folder), TensorBoardLogger(folder)])
    # What later commands and other callbacks add.
    for step, answer in ((0, "no"), (12, "yes")):
        answers = [ScoredAnswer(CHAT, "yes", answer, answer == "yes"), ScoredAnswer("how?", "so", "x" * 900, False)]
        write_answers(folder, step, answers)
    cells = [["mmlu", 0.25, 0.75], ["a long name of a task " * 9, None, 1.0]]
    for kind, is_fault in (("evaluation", False), ("parity", True)):
        written, columns = "2026-11-23T08:00:00", ["task", "base", "trained"]
        table = ReportTable(f"the {kind}", f"lit_ft {kind} RUN", written, columns, cells, ["<note>"], is_fault)
        table.write(folder, kind)
    return write_report(folder)[0]


class Elements(HTMLParser):
    """Elements and text of a page; a tag that is not closed is an error."""

    EMPTY = ("meta", "link", "path", "use", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parsed(path: Path) -> Elements:
    elements = Elements()
    elements.feed(path.read_text(encoding="utf-8"))
    assert elements.open == []
    return elements


def test_the_page_needs_nothing_else(page: Path) -> None:
    elements = parsed(page)
    assert "script" not in {tag for tag, _ in elements.seen}
    links = [value for _, attributes in elements.seen for key, value in attributes.items() if key in ("src", "href")]
    assert {link for link in links if link is not None and not link.startswith("#")} == {"data:,"}
    assert not re.search(r"url\((?!#)|@import", page.read_text())
    assert page.stat().st_size < 150_000
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in elements.seen


def test_the_page_shows_what_the_callbacks_wrote(page: Path) -> None:
    elements = parsed(page)
    text = "".join(elements.words)
    charts = [attributes["aria-label"] for tag, attributes in elements.seen if tag == "svg"]
    assert charts == ["loss", "learning rate", "loss on general text"]
    assert "<script>alert('Who <i>?')</script> & " in text  # as text
    assert "row-" in text
    assert "12 samples, seen 24 times" in text
    assert "2.000\u00a0→ 2.000" in text
    assert "nats per token, +0.000" in text
    assert "loss on general text" in text
    assert "width: 3" in text
    assert torch.__version__ in text
    assert "What is not here" not in text


def test_sections_of_what_the_run_has(page: Path) -> None:
    elements = parsed(page)
    text = " ".join("".join(elements.words).split())
    sections = [attributes["id"] for tag, attributes in elements.seen if tag == "h2" and "id" in attributes]
    assert " ".join(sections) == "tables curves time answers validation batch losses metrics configuration"
    assert [attributes["href"] for tag, attributes in elements.seen if tag == "a"] == [f"#{id_}" for id_ in sections]
    # Only the second table is faulty.
    assert text.index("the evaluation · 2026-11-23 08:00:00") < text.index("the parity · something is wrong")
    assert text.count("something is wrong") == 1
    assert "lit_ft evaluation RUN" in text
    # Answers of the first and the last step side by side, others folded away.
    assert "You & me" in text
    shown = re.findall(r"step (\d+)<script>", text)
    assert shown == ["0", "12", "5", "10"]
    assert "2 steps in between" in text
    assert "1 of 2 are right after step 12, 0 were after step 0." in text
    assert [attributes for tag, attributes in elements.seen if attributes.get("class") == "role"]


def test_the_first_batch_is_shown_with_its_supervised_tokens(page: Path) -> None:
    batch = json.loads((page.parent / "first_batch.json").read_text())
    assert (batch["step"], batch["samples"], batch["tokens"], batch["supervised"]) == (0, 2, 2 * 27, 2 * 4)
    assert "".join(text for text, _, _ in batch["shown"][0]["head"]) == CHAT
    marked = '<mark>书</mark><mark class="special">&lt;|im_end|&gt;</mark></pre>'
    assert page.read_text().count(marked) == 2
    assert '<span class="special">&lt;|im_start|&gt;</span><span>u</span>' in page.read_text()


def test_a_first_batch_of_the_models_own_answers_says_so(tmp_path: Path) -> None:
    batch = {"input_ids": torch.tensor([list(b"abcde")]), "segment_lengths": [5], "predict_at": torch.tensor([2, 3])}
    batch["target_weights"] = torch.tensor([-0.5, -0.5])
    write_first_batch(tmp_path, describe_batch(batch, 0, byte_tokenizer()))
    (tmp_path / "metrics.csv").write_text("step,train/reward\n0,0.2\n1,0.1\n")
    text = " ".join("".join(parsed(write_report(str(tmp_path))[0]).words).split())
    assert "The model has written the 2 marked tokens itself." in text
    assert "learns to write" not in text


def test_a_first_batch_of_pairs_names_their_answers(tmp_path: Path) -> None:
    batch = {"input_ids": torch.tensor([[*b"abcd", *b"ab", *b"abe"]]), "segment_lengths": [4, 2, 3, 2]}
    batch["input_ids"] = torch.cat([batch["input_ids"], torch.tensor([list(b"af")])], dim=1)
    batch |= {"predict_at": torch.tensor([2, 4, 7, 9]), "pairs": torch.tensor([7, 3])}
    batch["target_answers"] = torch.tensor([0, 1, 2, 3])
    write_first_batch(tmp_path, described := describe_batch(batch, 0, byte_tokenizer()))
    assert (described["pairs"], described["samples"], described["supervised"]) == (2, 4, 4)
    (tmp_path / "metrics.csv").write_text("step,train/cross_entropy,train/loss\n0,2.0,0.2\n1,1.0,0.1\n")
    text = " ".join("".join(parsed(write_report(str(tmp_path))[0]).words).split())
    assert "2 pairs of a chosen and a rejected answer, 4 conversations, 11 tokens." in text
    assert "learns to prefer the marked tokens of chosen answers to those of rejected ones, 4 in all" in text
    assert text.index("Pair 1, chosen") < text.index("Pair 1, rejected") < text.index("Pair 2, chosen")
    assert "learns to write" not in text
    assert "cross-entropy" in text  # a chart of its own


def test_a_first_batch_of_judged_answers_names_them(tmp_path: Path) -> None:
    batch = {
        "input_ids": torch.tensor([list(b"abcdabe")]),
        "segment_lengths": [4, 3],
        "predict_at": torch.tensor([1, 2, 5]),
    }
    batch |= {"pairs": torch.tensor([7, 3]), "target_answers": torch.tensor([1, 1, 2])}
    write_first_batch(tmp_path, describe_batch(batch, 0, byte_tokenizer()))
    (tmp_path / "metrics.csv").write_text("step,train/kl,train/loss\n0,2.0,0.2\n1,1.0,0.1\n")
    text = " ".join("".join(parsed(write_report(str(tmp_path))[0]).words).split())
    assert "2 answers that are judged one by one, 7 tokens." in text
    assert text.index("Answer 1, rejected") < text.index("Answer 2, chosen")


def test_a_resumed_run_keeps_its_first_batch_and_another_writes_none(tmp_path: Path) -> None:
    options = {**QUIET, "default_root_dir": tmp_path, "logger": CSVLogger(tmp_path)}
    begin = Trainer(**options, max_steps=1, callbacks=[RunReport()])
    begin.fit(Plain(), data())
    begin.save_checkpoint(tmp_path / "last.ckpt")
    assert json.loads((tmp_path / "first_batch.json").read_text())["step"] == 0
    (tmp_path / "first_batch.json").write_text('{"step": "kept"}')
    resumed = Trainer(**options, max_steps=2, callbacks=[RunReport()])
    resumed.fit(Plain(), data(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert (tmp_path / "first_batch.json").read_text() == '{"step": "kept"}'
    fit(tmp_path / "none", [RunReport(first_batch=False)], CSVLogger(tmp_path / "none"))
    assert not (tmp_path / "none" / "first_batch.json").exists()


class Slow(Plain):
    """Takes a fifth of a second for a step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        time.sleep(0.2)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_training_that_goes_on_within_an_epoch_is_timed_as_training(tmp_path: Path) -> None:
    options = {**QUIET, "default_root_dir": tmp_path, "logger": CSVLogger(tmp_path)}
    # Not the trainer's state at the end of a fit, from which a resumed one begins an epoch.
    within = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    Trainer(**options | {"enable_checkpointing": True}, max_steps=2, callbacks=[within]).fit(Plain(), data())
    resumed = Trainer(**options, max_steps=4, callbacks=[RunReport()])
    resumed.fit(Slow(), data(), ckpt_path=tmp_path / "step=1.ckpt", weights_only=False)
    seconds = json.loads((tmp_path / "environment.json").read_text())["seconds"]
    assert seconds["training"] > 0.6


class Texts(LightningDataModule):
    """Has the tokenizer that its module lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = byte_tokenizer()

    def train_dataloader(self) -> DataLoader:
        return data(2)


def test_the_tokenizer_may_be_that_of_the_data(tmp_path: Path) -> None:
    module = Plain()
    module.tokenizer = None
    logger = CSVLogger(tmp_path)
    trainer = Trainer(**QUIET, max_steps=1, default_root_dir=tmp_path, callbacks=[RunReport()], logger=logger)
    trainer.fit(module, datamodule=Texts())
    assert json.loads((tmp_path / "first_batch.json").read_text())["supervised"] == 8


def test_a_damaged_table_is_named_and_the_others_are_shown(page: Path, tmp_path: Path) -> None:
    shutil.copytree(page.parent / "tables", tmp_path / "tables")
    (tmp_path / "tables" / "parity-2.json").write_text('{"title": "a"}')
    (tmp_path / "first_batch.json").write_text('{"samples": "two"}')
    text = "".join(parsed(write_report(str(tmp_path))[0]).words)
    assert re.search(r"parity-2\.json cannot be read \(ValueError: .* run its command again\)", text)
    assert "the run's first_batch: the file is damaged" in text
    assert "the evaluation" in text


def test_a_batch_that_cannot_be_shown_is_a_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    module = Plain()
    module.tokenizer = {"no": "tokenizer"}
    with pytest.warns(UserWarning, match="RunReport cannot write the first batch to .*all_special_ids"):
        fit(tmp_path, [RunReport()], CSVLogger(tmp_path), module)
    assert "no first batch: RunReport needs a module" in (tmp_path / "report.html").read_text()


def test_pictures_follow_the_page_by_night(page: Path) -> None:
    svg = page.read_text()
    assert "currentColor" in svg
    assert "#000000" not in svg


def test_the_unit_is_within_the_picture_and_beside_the_numbers() -> None:
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    draw("learning rate", "samples/s", {"lr": [(0.0, 0.000025), (1.0, 0.000175)]})
    axes = report_plots._axes()
    canvas = agg.FigureCanvasAgg(axes.figure)
    canvas.draw()
    unit = axes.yaxis.label.get_window_extent(canvas.get_renderer())
    numbers = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert 0 <= unit.x0 < unit.x1 < min(number.x0 for number in numbers)


# --- in a browser ----------------------------------------------------------------------------------


def browse(page: Path, *options: str) -> tuple[str, str]:
    """What Chromium makes of a page's DOM, and what it logs."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    done = subprocess.run(
        [*command, profile, *options, page.as_uri()], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout, done.stderr


needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium")


@needs_chromium
def test_on_a_phone_nothing_is_wider_than_the_screen_and_no_error_is_logged(page: Path, tmp_path: Path) -> None:
    # In a frame: a window of Chromium's is 500 wide at least.
    frame, phone = tmp_path / "frame.html", tmp_path / "phone.html"
    script = "console.error('seen'); parent.postMessage([innerWidth, document.documentElement.scrollWidth], '*')"
    frame.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    listen = "<script>onmessage = (event) => document.title = event.data</script>"
    phone.write_text(f'<title></title>{listen}<iframe src="frame.html" style="width: 390px; border: 0"></iframe>')
    dom, logged = browse(phone, "--virtual-time-budget=5000", "--dump-dom")
    assert re.findall("<title>(.*)</title>", dom) == ["390,390"]
    assert "CONSOLE" in logged  # so an error would be seen
    _, logged = browse(page, "--dump-dom")
    assert "CONSOLE" not in logged


@needs_chromium
@pytest.mark.parametrize(
    ("scheme", "paper", "ink"), [("light", (255, 255, 255), (28, 34, 48)), ("dark", (18, 22, 29), (228, 232, 239))]
)
def test_screenshots_by_day_and_by_night(page: Path, tmp_path: Path, scheme: str, paper: Any, ink: Any) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow reads the screenshot")
    shot = tmp_path / f"{scheme}.png"
    dark = ["--force-dark-mode"] if scheme == "dark" else []
    browse(page, *dark, "--window-size=900,1200", f"--screenshot={shot}")
    picture = image.open(shot).convert("RGB")
    colors = {color: count for count, color in picture.getcolors(2**24)}
    assert picture.getpixel((2, 2)) == paper
    assert colors[ink] > 100  # text of the page
    assert min(map(sum, colors)) > min(sum(paper), sum(ink)) - 15  # no letter of a picture is left black
    assert colors[(61, 133, 217)] > 100  # curves


# --- what it reads ---------------------------------------------------------------------------------


def test_metrics_are_read_by_step(tmp_path: Path) -> None:
    lines = ["epoch,loss,step,val", "0,1.5,9,", "0,,9,2", "1,nan,19,", "1,broken,29,", ",,30,3"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    curves = read_metrics(tmp_path / "metrics.csv")
    assert curves["val"] == [(10.0, 2.0), (30.0, 3.0)]
    assert curves["loss"][0] == (10.0, 1.5)
    assert [step for step, _ in curves["loss"]] == [10.0, 20.0, 30.0]
    assert all(math.isnan(value) for _, value in curves["loss"][1:])
    # Lightning's monitors give no epoch, and count as it does.
    lines = ["DeviceStatsMonitor.on_train_batch_end/cpu,epoch,loss,lr-AdamW,mine,step", ",,,0.1,,4", "7,,,,,4"]
    (tmp_path / "metrics.csv").write_text("\n".join([*lines, ",0,1.5,,,4", ",,,,2,5"]) + "\n")
    assert {points[0][0] for points in read_metrics(tmp_path / "metrics.csv").values()} == {5.0}


def test_metrics_are_sorted_into_charts() -> None:
    two = [(0.0, 1.0), (1.0, 2.0)]
    names = ["throughput/mfu", "lr-AdamW", "val_loss", "train/loss_step", "train/loss/a", "memory/host_rss_mib", "odd"]
    names += [f"val/loss/{source}" for source in "abc"]
    names += ["val/reward_accuracy", "val/reward_margin", "val/reward_chosen", "val/log_prob_rejected"]
    names += ["train/reward", "val/reward", "train/kl", "train/rewards/Matches", "val/cut_share", "val/answer_tokens"]
    names += ["train/divergence", "val/divergence"]
    charts = sort_into_charts({**dict.fromkeys(names, two), "once/loss": two[:1]})
    assert {title: list(curves) for (title, _), curves in charts.items()} == {
        "loss": ["val_loss", "train/loss_step"],
        "training loss by source": ["train/loss/a"],
        **{f"val/loss/{source}": [f"val/loss/{source}"] for source in "abc"},
        "accuracy": ["val/reward_accuracy"],
        "reward margin": ["val/reward_margin"],
        "rewards": ["val/reward_chosen"],
        "log-probability of answers": ["val/log_prob_rejected"],
        "reward": ["train/reward", "val/reward"],
        "parts of the reward": ["train/rewards/Matches"],
        "answers with a signal, and cut ones": ["val/cut_share"],
        "divergence from the reference": ["train/kl"],
        "divergence from the teacher": ["train/divergence", "val/divergence"],
        "length of answers": ["val/answer_tokens"],
        "learning rate": ["lr-AdamW"],
        "MFU": ["throughput/mfu"],
        "memory": ["memory/host_rss_mib"],
    }


def test_the_headline_is_first(tmp_path: Path) -> None:
    lines = ["step,train/loss,val/loss,val/exact_match,throughput/run/tokens_per_second,other/loss,val/reward_accuracy"]
    lines += ["1,2.5,,0.125,,9,", "9,0.0125,,,,,", "9,,0.4,1.0,1234.5,,0.75"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    environment = {
        "title": "my recipe",
        "command": "python -m lit_ft fit --config 'my recipe.yaml'",
        "optimizer_steps": 9,
        "first_step": 4,
        "seconds": {"start": 20.5, "training": 50.0},
        "peak_process_bytes": 3 * 2**30,
        "peak_device_bytes": None,
    }
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    path, run = write_report(tmp_path)
    assert [(figure.label, figure.value.replace("\u00a0", " "), figure.note) for figure in headline(run)] == [
        ("train/loss", "2.5 → 0.0125", "first and last logged"),
        ("val/loss", "0.4", "logged once"),
        ("val/exact_match", "12.5% → 100.0%", "first and last logged"),
        ("val/reward_accuracy", "75.0%", "logged once"),
        ("tokens per second", "1,234", "mean of all training steps"),
        ("time", "1 min 10 s", "5 optimizer steps after 4 earlier ones"),
        ("peak memory", "3.0 GiB", "of the process, rank 0"),
    ]
    text = "".join(parsed(path).words)
    assert text.count("my recipe") == 3  # title, heading, command
    assert text.index("2.5\u00a0→ 0.0125") < text.index("python -m lit_ft fit --config 'my recipe.yaml'")
    assert text.index("my recipe.yaml") < text.index("Curves") < text.index("Time") < text.index("Everything")


def test_the_times_of_a_run_add_up(page: Path) -> None:
    environment = json.loads((page.parent / "environment.json").read_text())
    assert list(environment["seconds"]) == [
        "start: imports, data, model",
        "callbacks before the first step",
        "training",
        "callbacks after the last step",
    ]
    assert 0 < sum(environment["seconds"].values()) < 100
    assert shlex.split(environment["command"])[1:] == sys.orig_argv[1:]
    assert environment["peak_process_bytes"] > 2**27


@pytest.mark.slow
def test_a_second_fit_has_times_of_its_own(tmp_path: Path) -> None:
    report = RunReport()
    fit(tmp_path / "first", [report], False)
    time.sleep(1)  # between the fits, and so of neither
    began = time.time()
    fit(tmp_path / "second", [report], False)
    environment = json.loads((tmp_path / "second" / "environment.json").read_text())
    assert sum(environment["seconds"].values()) <= time.time() - began


def test_curves_and_configuration_are_those_of_the_runs_own_loggers(tmp_path: Path) -> None:
    """Without a folder for each run: the default is the working directory."""
    fit(tmp_path, [RunReport()], CSVLogger(tmp_path))
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "config.yaml").write_text("of: another project\n")
    assert "train/loss" in read_run(tmp_path).curves
    fit(tmp_path, [RunReport()], False)
    run = read_run(tmp_path)
    assert run.curves == {}
    assert "no metrics.csv: add a CSVLogger" in run.missing
    assert run.config == ""
    fit(tmp_path / "run", [RunReport()], CSVLogger(tmp_path / "logs"))
    assert "train/loss" in read_run(tmp_path / "run").curves


def test_long_curves_are_thinned_to_means() -> None:
    assert thinned([(float(i), 2.0 * i) for i in range(MOST_POINTS * 2)])[:2] == [(0.5, 1.0), (2.5, 5.0)]
    assert thinned([(1.0, 1.0)]) == [(1.0, 1.0)]


def test_a_folder_with_nothing_and_one_with_broken_files(tmp_path: Path) -> None:
    path, run = write_report(tmp_path)
    text = "".join(parsed(path).words)
    assert "no metrics.csv: add a CSVLogger" in text
    assert run.curves == {}
    (tmp_path / "samples.jsonl").write_text('{"step": 1')
    (tmp_path / "environment.json").write_text("[")
    text = "".join(parsed(write_report(tmp_path)[0]).words)
    assert "samples.jsonl cannot be read (JSONDecodeError" in text
    assert "environment.json cannot be read (JSONDecodeError" in text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("environment.json", "[]", "environment.json cannot be read (ValueError: it holds no JSON object)"),
        ("environment.json", '{"log_folders": 3}', "no metrics.csv: add a CSVLogger"),
        ("samples.jsonl", "[" * 100_000, "samples.jsonl cannot be read (RecursionError"),
        ("metrics.csv", f'step,loss\n0,"{"9" * 2000}', "metrics.csv cannot be read (Error: field larger"),
    ],
    ids=["a list", "a number for folders", "nested", "a long cell"],
)
def test_a_file_of_another_kind_costs_its_part_alone(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    longest = csv.field_size_limit(1000)  # of the whole process; reading data sets raises it
    try:
        assert said in "".join(parsed(write_report(tmp_path)[0]).words)
    finally:
        csv.field_size_limit(longest)


def test_wrong_steps_are_listed(tmp_path: Path) -> None:
    spike = {"step": 7, "reasons": ["loss is nan"], "batches": [{"batch_idx": 3, "ids": ["a", "b"]}]}
    (tmp_path / "spikes").mkdir()
    (tmp_path / "spikes" / "step00000007.rank0.json").write_text(json.dumps(spike))
    text = "".join(parsed(write_report(tmp_path)[0]).words)
    assert "loss is nan" in text
    assert "['a', 'b']" in text


def test_without_matplotlib_there_are_tables(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path, _ = write_report(page.parent, tmp_path / "plain.html")
    elements = parsed(path)
    assert "svg" not in {tag for tag, _ in elements.seen}
    assert "no curves: matplotlib is missing; pip install 'lit-ft-callbacks[plots]'" in "".join(elements.words)


def test_a_run_without_a_loss_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no curve of a loss; .* metrics.csv, which no logger of this run writes; add"):
        fit(tmp_path, [RunReport()], False)
    assert (tmp_path / "report.html").exists()
    (tmp_path / "metrics.csv").write_text("epoch,step,accuracy\n0,0,1\n0,1,1\n")
    with pytest.warns(UserWarning, match="no curve of a loss; log one as 'train/loss', say"):
        fit(tmp_path, [RunReport()], False)


def test_a_loss_that_was_logged_once_is_no_curve(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the run took 12 steps and logs at intervals of 12; lower log_every_n"):
        fit(tmp_path, [RunReport()], CSVLogger(tmp_path), log_every_n_steps=12)


def test_losses_that_are_logged_by_step_and_by_epoch_are_found(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """More curves than share a chart: each has one with its own name."""
    lines = ["epoch,step,train/loss_step,train/loss_epoch,val/loss", "0,0,4,,", "0,1,3,3.5,3", "1,2,2,,", "1,3,1,1.5,2"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    fit(tmp_path, [RunReport()], False)
    assert not [warning for warning in recwarn if "no curve of a loss" in str(warning.message)]
    labels = [figure.label for figure in headline(read_run(tmp_path))]
    assert labels[:3] == ["train/loss_epoch", "train/loss_step", "val/loss"]


def test_an_unwritable_folder_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="RunReport cannot write its page to .* give path="):
        fit(tmp_path, [RunReport(folder=tmp_path / "file" / "x")], False)


def test_a_damaged_file_of_versions_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text('{"title": "a run", "packa')
    with pytest.warns(UserWarning, match="RunReport replaces the damaged file '.*environment.json' .JSONDecodeError"):
        fit(tmp_path, [RunReport()], False)
    assert "started" in json.loads((tmp_path / "environment.json").read_text())


def test_a_file_of_another_program_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"question": "of another program"}\n')
    (tmp_path / "loss_ledger").mkdir()
    (tmp_path / "loss_ledger" / "summary.json").write_text('{"samples": "many", "worst": 3}')
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,3\n2,1\n")
    fit(tmp_path, [RunReport()], False)
    page = (tmp_path / "report.html").read_text()
    assert "samples: the file is damaged (KeyError: &#39;prompt&#39;)" in page
    assert "ledger: the file is damaged" in page
    assert "<svg" in page


def test_names_and_texts_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    names = ["$\\frac{$", "a[/b]", evil, "_hidden", "../up", "two\nlines", "\x1b[31mred", "\ud83d", "long" * 500]
    columns = ["step", *(f"train/loss/{name}" for name in names)]
    with (tmp_path / "metrics.csv").open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        csv.writer(file).writerows([columns, *([step, *[2.0] * len(names)] for step in (1, 2))])
    text = (tmp_path / "metrics.csv").read_bytes().replace("\ud83d".encode("utf-8", "surrogatepass"), b"x")
    (tmp_path / "metrics.csv").write_bytes(text)
    add_lines(tmp_path / "samples.jsonl", [{"step": 1, "prompt": evil, "answer": f"a\u2028b\x85c\x1b[2J{evil}"}])
    (tmp_path / "config.yaml").write_text(f"run: {evil}")
    _, run = write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert run.missing[0].startswith("no versions")
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)
    assert "\\x1b[31mred" in page
    captions = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert len(captions) == len(names)  # each curve has a chart of its own
    for shown in ("$\\frac{$", "a[/b]", "_hidden", "../up", "two\\nlines", "long" * 500):
        assert f"train/loss/{shown}" in captions
