"""ThroughputMonitor: exact sums under a clock that only the run's own parts move."""

import csv
import gc
import logging
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lit_callbacks import MemoryProfiler, ThroughputMonitor
from lit_callbacks.phases import PhaseProfiler, watch, within_a_step
from lit_callbacks.report.report_data import read_metrics
from lit_callbacks.throughput import clocks
from lit_callbacks.throughput.batch_counts import BatchCounts, count_batch
from lit_callbacks.throughput.throughput_monitor import PARTS, describe
from plain_modules import Digits, TinyLM, digits, make_trainer, texts
from ranks import on_ranks
from torch import Tensor
from torch.utils.data import DataLoader


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(clocks, "time", clock)
    return clock


class Slow(TinyLM):
    """Each part of training takes a time of its own."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.clock.now += 2
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.clock.now += 4
        super().backward(loss, *args, **kwargs)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.clock.now += 1000

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clock.now += 0.25

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.clock.now += 0.5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.now += 5000

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 0.125  # none of the named parts


class Generates(Slow):
    """Generates what it trains on, and asks a teacher; also in validation."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        with within_a_step(self.trainer, self, "generation"):
            self.clock.now += 32
        with within_a_step(self.trainer, self, "forward"):
            self.clock.now += 64
        return batch


class SlowCallback(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.clock.now += 8

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.now += 3000


class SlowLoader:
    def __init__(self, clock: Clock, batches: Any) -> None:
        self.clock, self.batches = clock, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.clock.now += 1
            yield batch


def run_slowly(
    tmp_path: Path, clock: Clock, kind: type[Slow] = Slow, **options: Any
) -> tuple[ThroughputMonitor, Trainer]:
    monitor = ThroughputMonitor(window=2, flops=lambda batch: 600.0, peak=1000.0)
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        tmp_path,
        callbacks=[SlowCallback(clock), monitor, saving],
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        val_check_interval=4,
        **options,
    )
    # 16 samples of 8 tokens, 3 of them padding and 2 of the other 5 a prompt: 8 batches, 4 optimizer steps.
    trainer.fit(kind(clock), SlowLoader(clock, texts(padding=3, prompt=2)), texts(4))
    return monitor, trainer


STEP = {"data": 2, "forward_backward": 12, "optimizer": 0.75, "callbacks": 16, "other": 0.25}
"""Seconds of two micro-batches and an optimizer step."""


def test_every_second_is_where_it_belongs(tmp_path: Path, clock: Clock) -> None:
    """Validation, checkpoints and what callbacks do in validation are left out to the last second."""
    monitor, trainer = run_slowly(tmp_path, clock)
    seconds = sum(STEP.values())
    assert seconds == 31
    for name, value in STEP.items():
        assert monitor.summary[f"step_seconds/{name}"] == value
    expected = {
        "step_seconds": 31,
        "data_wait": 2 / 31,
        "samples_per_second": 4 / 31,
        "total_tokens_per_second": 32 / 31,
        "non_padding_tokens_per_second": 20 / 31,
        "tokens_per_second": 20 / 31,
        "supervised_tokens_per_second": 12 / 31,
        "model_flops_per_second": 1200 / 31,
        "mfu": 1200 / 31 / 1000,
    }
    for name, value in expected.items():
        assert monitor.summary[name] == pytest.approx(value, rel=1e-9), name
        assert float(trainer.callback_metrics[f"throughput/{name}"]) == pytest.approx(value, rel=1e-6), name
    assert not any("device/" in name for name in monitor.summary)  # there is one
    assert "step_seconds/generation" not in monitor.summary


def test_what_a_module_does_outside_of_its_training_step(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monitor, trainer = run_slowly(tmp_path, clock, Generates)
    wanted = {**STEP, "generation": 64, "forward_backward": 12 + 128}
    assert {name: monitor.summary[f"step_seconds/{name}"] for name in wanted} == wanted
    assert float(trainer.callback_metrics["throughput/step_seconds/generation"]) == 64
    assert "s: data 0.9%, generation 28.7%, forward+backward 62.8%" in caplog.text


def test_the_window_forgets_and_the_run_does_not(tmp_path: Path, clock: Clock) -> None:
    class SlowAtFirst(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            clock.now += 10 if trainer.global_step < 2 else 0

    monitor = ThroughputMonitor(window=2)
    trainer = make_trainer(tmp_path, callbacks=[SlowAtFirst(), monitor], log_every_n_steps=1)
    trainer.fit(TinyLM(), SlowLoader(clock, texts(8)))
    # Four steps, the first not measured, of 11, 1 and 1 s with 16 tokens each.
    assert monitor.summary["tokens_per_second"] == 48 / 13
    assert float(trainer.callback_metrics["throughput/tokens_per_second"]) == 16


class LateClock(clocks.HostClock):
    """Clock of a device that is one step behind the host."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.now = clock.perf_counter

    def has_passed(self, point: float) -> bool:
        return self.now() - point >= 1


def test_steps_do_not_wait_for_a_log_that_never_comes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pending(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            pending.append(len(monitor._pending))

    pending: list[int] = []
    monkeypatch.setattr(
        "lit_callbacks.throughput.throughput_monitor.timer_of", lambda device: clocks.PhaseTimer(LateClock(clock))
    )
    monitor = ThroughputMonitor()
    trainer = make_trainer(tmp_path, callbacks=[monitor, Pending()], log_every_n_steps=0)
    trainer.fit(TinyLM(), SlowLoader(clock, texts(16)))
    assert pending == [0, 1, 1, 1, 1, 1, 1, 1]
    assert monitor._run.steps == 6
    assert monitor._run.seconds["data"] == 6


def test_what_is_left_out_is_said_once(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    run_slowly(tmp_path, clock, logger=logger)
    said = [record.getMessage() for record in caplog.records if "throughput" in record.getMessage()]
    assert said == [
        "throughput is measured from optimizer step 2 of this fit on, without validation and checkpoints",
        "throughput of 3 steps on 1 device: 0.129 samples/s, 1.032 tokens/s with padding, 0.6452 without, 0.3871 "
        "supervised, 3.87e-11 model TFLOP/s per device, MFU 3.9%\n"
        "a step takes 31 s: data 6.5%, forward+backward 38.7%, optimizer 2.4%, callbacks 51.6%, other 0.8%",
    ]
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"throughput/run/mfu", "throughput/mfu", "throughput/step_seconds/data"} <= set(header)


def test_figures_are_logged_at_the_step_of_what_the_module_logs(tmp_path: Path, clock: Clock) -> None:
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, callbacks=[ThroughputMonitor()], logger=logger, log_every_n_steps=3)
    trainer.fit(TinyLM(), SlowLoader(clock, texts()))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("train/loss", "throughput/samples_per_second"):
        assert [row["step"] for row in rows if row[name]] == ["2", "5"], name


def test_hooks_that_a_callback_does_not_have_are_no_phase(tmp_path: Path, clock: Clock) -> None:
    def wait(*_: Any) -> None:
        clock.now += 1

    class Empty(Callback): ...

    heard: list[str] = []

    class Listen(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            watch(trainer, heard.append)

    callbacks = [LambdaCallback(on_before_zero_grad=wait), Empty(), ThroughputMonitor(), Listen()]
    trainer = make_trainer(tmp_path, callbacks=callbacks, max_steps=3, enable_checkpointing=False)
    trainer.fit(TinyLM(), texts())
    # A step calls six hooks of each of four callbacks; one of the first and one of the monitor have something to do.
    first, second = [place for place, phase in enumerate(heard) if phase == "data"][:2]
    assert heard[first:second].count("callbacks") == 2
    assert callbacks[2].summary["step_seconds/callbacks"] == 1


@pytest.mark.slow
def test_the_users_profiler_keeps_what_it_recorded(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(dirpath=tmp_path, filename="times")

    class Collect(Callback):
        def teardown(self, *_: Any, **__: Any) -> None:
            gc.collect()  # a profiler of Lightning that is collected forgets its records

    make_trainer(tmp_path, callbacks=[ThroughputMonitor(), Collect()], profiler=profiler).fit(Digits(), digits())
    report = (tmp_path / "fit-times.txt").read_text()
    assert "Profile stats for: [Strategy]SingleDeviceStrategy.training_step" in report


def test_the_users_profiler_goes_on_and_comes_back(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            seen.append(type(trainer.profiler))

    trainer = make_trainer(tmp_path, callbacks=[ThroughputMonitor(), Look()], profiler=profiler)
    trainer.fit(Digits(), digits())
    assert set(seen) == {PhaseProfiler}
    assert trainer.profiler is profiler
    assert len(profiler.recorded_durations["[Strategy]SingleDeviceStrategy.training_step"]) == 8


def test_a_trainer_can_be_copied_within_a_fit(tmp_path: Path) -> None:
    class Copy(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            assert deepcopy(trainer).profiler.phase == trainer.profiler.phase  # type: ignore[attr-defined]

    make_trainer(tmp_path, callbacks=[ThroughputMonitor(), Copy()], max_steps=2).fit(Digits(), digits())


def test_manual_optimization_with_two_optimizers(tmp_path: Path, clock: Clock) -> None:
    class Manual(Digits):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
                clock.now += 2
                loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
                self.log("train/loss", loss)
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            class Slow(torch.optim.SGD):
                def step(self, *args: Any, **kwargs: Any) -> Any:
                    clock.now += 1
                    return super().step(*args, **kwargs)

            return [Slow(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[2])]

    monitor, memory = ThroughputMonitor(), MemoryProfiler(tmp_path, picture=False)
    trainer = make_trainer(
        tmp_path, callbacks=[monitor, memory], log_every_n_steps=3, logger=CSVLogger(tmp_path, name="", version="")
    )
    trainer.fit(Manual(), digits())
    assert trainer.global_step == 16
    curves = read_metrics(tmp_path / "metrics.csv")
    of = {name: [step for step, _ in curves[name]] for name in curves}
    assert of["train/loss"] == of["throughput/samples_per_second"] == of["memory/host_rss_mib"] == [3, 6]
    assert monitor.summary["samples_per_second"] == 2 / 6
    assert monitor.summary["step_seconds/optimizer"] == 2
    assert monitor.summary["step_seconds/forward_backward"] == 4
    assert float(trainer.callback_metrics["throughput/samples_per_second"]) == pytest.approx(2 / 6)


def test_a_batch_whose_tokens_cannot_be_counted_is_one_warning(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[monitor := ThroughputMonitor()])
    with pytest.warns(UserWarning, match="ThroughputMonitor") as caught:
        trainer.fit(Digits(), digits())
    ours = [str(warning.message) for warning in caught if "ThroughputMonitor" in str(warning.message)]
    assert ours == [
        "ThroughputMonitor: no FLOP/s and no MFU: Digits does not hold exactly one transformer config, of a decoder or "
        "an encoder alone; pass flops=",
        "ThroughputMonitor: cannot count the tokens of a list without 'input_ids', so no tokens per second are "
        "logged; pass count=<function from batch to int>",
    ]
    assert trainer.global_step == 8
    assert not any("tokens" in name for name in monitor.summary)
    assert monitor.summary["samples_per_second"] > 0


def test_a_count_of_ones_own(tmp_path: Path, clock: Clock) -> None:
    monitor = ThroughputMonitor(count=lambda batch: 7)
    make_trainer(tmp_path, callbacks=[monitor]).fit(Digits(), SlowLoader(clock, digits()))
    assert (monitor.summary["tokens_per_second"], monitor.summary["samples_per_second"]) == (7, 2)


def test_a_function_that_raises_is_one_warning(tmp_path: Path) -> None:
    def wrong(batch: Any) -> int:
        raise KeyError("tokens")

    monitor = ThroughputMonitor(count=wrong, flops=wrong)
    with pytest.warns(UserWarning, match="ThroughputMonitor: cannot count") as caught:
        make_trainer(tmp_path, callbacks=[monitor]).fit(Digits(), digits())
    ours = [str(warning.message) for warning in caught if "KeyError" in str(warning.message)]
    assert ours == [
        "ThroughputMonitor: cannot count a batch (KeyError: 'tokens')",
        "ThroughputMonitor: cannot count FLOPs (KeyError: 'tokens')",
    ]
    assert monitor.summary["samples_per_second"] > 0


def two_ranks(folder: Path, strategy: str) -> Any:
    clock = Clock()
    clocks.time = clock  # type: ignore[assignment]
    monitor = ThroughputMonitor(flops=lambda batch: 50.0, peak=100.0)
    trainer = make_trainer(folder, callbacks=[monitor], strategy=strategy, devices=2, log_every_n_steps=1)
    clock_rate = 1 + trainer.global_rank

    class Loader(SlowLoader):
        def __iter__(self) -> Iterator[Any]:
            for batch in self.batches:
                self.clock.now += clock_rate
                yield batch

    trainer.fit(TinyLM(), Loader(clock, texts(8)))
    return monitor.summary


@pytest.mark.processes
def test_ranks_are_added_up(tmp_path: Path) -> None:
    """Rank 0 takes 1 s a step and rank 1 takes 2: 2 samples a step and rank."""
    first, second = on_ranks(2, two_ranks, tmp_path, "ddp", timeout=120)
    assert first == second
    assert first["samples_per_second"] == 2 / 1 + 2 / 2
    assert first["device/samples_per_second"] == 1.5
    assert first["step_seconds"] == 1.5
    assert first["mfu"] == (50 / 1 + 50 / 2) / 2 / 100


def test_a_batch_that_looks_like_text_and_is_not_is_one_warning(tmp_path: Path) -> None:
    class Rows(Digits):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            return self.layers(batch["input_ids"].float()).mean()

    batches = DataLoader([{"input_ids": torch.ones(2, 64), "segment_lengths": 7}] * 3, batch_size=None)
    trainer = make_trainer(tmp_path, callbacks=[monitor := ThroughputMonitor()])
    with pytest.warns(UserWarning, match=r"cannot count a batch \(TypeError: 'int' object is not iterable\)"):
        trainer.fit(Rows(), batches)
    assert trainer.global_step == 3
    assert monitor.summary["step_seconds"] > 0


def test_a_run_that_is_too_short_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[ThroughputMonitor(skip_steps=2)], max_steps=1)
    message = "no figures: the run took 1 step, and the first skip_steps=2 are not measured; train longer or lower it"
    with pytest.warns(UserWarning, match=message):
        trainer.fit(Digits(), digits())


def test_steps_that_lightning_does_not_count_are_a_warning(tmp_path: Path) -> None:
    class Uncounted(Digits):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    trainer = make_trainer(tmp_path, callbacks=[ThroughputMonitor()])
    with pytest.warns(UserWarning, match=r"no optimizer step \(batches: 8\); .* self\.optimizers\(\)"):
        trainer.fit(Uncounted(), digits())


def test_what_batches_hold() -> None:
    row = {"input_ids": torch.zeros(1, 9), "segment_lengths": [4, 5], "targets": torch.zeros(3)}
    assert count_batch(row) == BatchCounts(2, 9, 9, 3, 3, [4, 5])
    assert count_batch({**row, "pairs": torch.tensor([5])}) == BatchCounts(1, 9, 9, 3, 3, [4, 5])
    empty = {"input_ids": torch.zeros(1, 0), "segment_lengths": [], "targets": torch.zeros(0)}
    assert count_batch(empty) == BatchCounts(0, 0, 0, 0, 0, [])
    assert count_batch({**row, "is_dummy": True}) == BatchCounts(0, 0, 0, 0, 0, [])
    assert count_batch({"input_ids": torch.zeros(2, 5)}) == BatchCounts(2, 10, 10, None, 10, [5, 5])
    assert count_batch([torch.zeros(3, 2), torch.zeros(3)]) == BatchCounts(samples=3)
    assert count_batch({"weight": torch.tensor(0.5), "image": torch.zeros(3, 2)}) == BatchCounts(samples=3)
    assert count_batch("nothing") == BatchCounts()
    ids = torch.zeros(3, 5, dtype=torch.long)
    of_samples = {"input_ids": ids, "labels": torch.zeros(3)}
    assert count_batch(of_samples) == BatchCounts(3, 15, 15, None, 15, [5, 5, 5])
    of_decoder = {"input_ids": ids, "labels": torch.zeros(3, 4)}
    assert count_batch(of_decoder) == count_batch(of_samples)
    for mask in (torch.ones(3, 1, 5, 5), [[1] * 5] * 3):
        assert count_batch({"input_ids": ids, "attention_mask": mask}) == BatchCounts(3, 15)
    padded = count_batch(next(iter(texts(2, padding=3, prompt=2))))
    assert (padded.samples, padded.total_tokens) == (2, 16)
    assert (int(padded.non_padding_tokens), int(padded.supervised_tokens)) == (10, 6)  # type: ignore[arg-type]
    assert int(padded.pairs(None)) == 2 * 5 * 5
    assert int(padded.pairs(3)) == 2 * 5 * 3
    assert count_batch(row).pairs(4) == 4 * 4 + 5 * 4


def test_a_run_whose_batches_cannot_be_counted_says_so() -> None:
    """As batches of texts: there are seconds, and no rates."""
    seconds = dict.fromkeys((f"step_seconds/{part}" for part in PARTS), 0.1)
    lines = describe({"step_seconds": 0.5, **seconds}, steps=3, ranks=1).splitlines()
    assert lines[0] == (
        "throughput of 3 steps on 1 device: unknown, as batches hold no tensors; "
        "pass count=<function from batch to BatchCounts>"
    )


def test_a_peak_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="peak='measured'.*: give 'datasheet', 'measure', or a number"):
        ThroughputMonitor(peak="measured")  # type: ignore[arg-type]


def test_a_peak_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="peak=0.*FLOP/s must be positive"):
        ThroughputMonitor(peak=0)


def test_a_second_fit_warns_again(tmp_path: Path) -> None:
    """Of another module, perhaps: in a notebook callbacks are often used twice."""
    monitor = ThroughputMonitor()
    for _ in range(2):
        with pytest.warns(UserWarning, match="no figures: the run took 1 step"):
            make_trainer(tmp_path, callbacks=[monitor], max_steps=1).fit(Digits(), digits())
