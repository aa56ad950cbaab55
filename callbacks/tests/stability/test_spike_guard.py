"""SpikeGuard on plain Lightning modules: what is skipped, that nothing moves then, and what is kept as evidence."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lit_callbacks import SpikeGuard, SpikesPersist
from lit_callbacks.distributed.gradient_norms import squared_norm
from lit_callbacks.stability.spike_guard import History, excess, may_exceed
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


class Scaled(LightningModule):
    """Its gradient is as large as the batch says; it keeps its weights as they are after each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.weights: list[torch.Tensor] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for layer in (self.first, self.second):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.second(self.first(torch.ones(len(batch["scale"]), 4)))[:, 0] * batch["scale"]).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        whole = self.second.weight.detach()
        self.weights.append(getattr(whole, "full_tensor", lambda: whole)().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


def rows(scales: list[float], batch_size: int = 1) -> DataLoader:
    return DataLoader([{"scale": s, "id": f"row {i}"} for i, s in enumerate(scales)], batch_size=batch_size)


def moved(module: Scaled) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(module.weights, module.weights[1:], strict=False)]


def test_excess_by_hand() -> None:
    # Powers of e: the median is e^3, the median absolute deviation of the logarithms 1.
    assert excess(math.e**9, [math.e**k for k in (1, 2, 3, 4, 5)]) == pytest.approx(6 / 1.4826)
    # A run without any noise: a tenth of the median counts as its deviation.
    assert excess(2.0 * math.e, [2.0, 2.0, 2.0]) == pytest.approx(10.0)
    # Negative losses have no logarithms.
    assert excess(9.0, [-1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(6 / 1.4826)


def test_what_cannot_exceed_does_not() -> None:
    """The short way says no only where the long one does, wherever the history lies; and mostly it says no."""
    draw = random.Random(0)
    no, all_of_them = 0, 0
    for shift in (0.0, -0.5, -3.0):
        for _ in range(500):
            history = [draw.lognormvariate(0, 0.3) + shift for _ in range(draw.randint(2, 30))]
            value, threshold = draw.lognormvariate(0.3, 1) + shift, draw.uniform(0.5, 8)
            all_of_them += shift == 0
            if not may_exceed(value, sorted(history), threshold):
                assert excess(value, history) <= threshold
                no += 1
    assert no > all_of_them / 2


def test_the_history_is_kept_by_time_and_by_size() -> None:
    draw = random.Random(0)
    history, all_values = History(7, [2.0, 1.0]), [2.0, 1.0]
    for _ in range(200):
        all_values.append(float(draw.randint(0, 9)))
        history.append(all_values[-1])
        assert list(history.values) == all_values[-7:]
        assert history.ordered == sorted(all_values[-7:])


def test_a_norm_that_the_module_has_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Measuring(Scaled):
        def measured_gradient_norm(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
            return torch.tensor(1000.0 if self.trainer.global_step == 25 else 1.0)

    monkeypatch.setattr("lit_callbacks.stability.spike_guard.squared_norm", None)
    guard = SpikeGuard(folder=tmp_path)
    Trainer(**QUIET, callbacks=[guard]).fit(module := Measuring(), rows([1.0] * 30))
    assert [step for step, has_moved in enumerate(moved(module), 1) if not has_moved] == [25]
    assert guard.skipped_steps == 1
    assert json.loads((tmp_path / "step00000025.rank0.json").read_text())["gradient_norm"] == pytest.approx(1000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_norm_is_finite_and_exact_in_every_dtype(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(20, 20, dtype=dtype))
    weight.grad = torch.full_like(weight, 4128)  # a norm over the largest of fp16, and one of ten bits: bf16 has eight
    assert float(squared_norm([weight], Trainer(**QUIET))) == pytest.approx((20 * 4128) ** 2, rel=1e-5)


@pytest.mark.parametrize("bad", [1000.0, math.nan, math.inf])
def test_a_bad_step_moves_nothing_and_leaves_evidence(tmp_path: Path, bad: float) -> None:
    """AdamW decays weights and has momentum by then: a step with gradients of zero would move them."""
    guard, module = SpikeGuard(warmup_steps=4), Scaled()
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard])
    with pytest.warns(UserWarning, match=r"step 6: .*(is nan|is inf|is -inf|deviations above its median)"):
        run.fit(module, rows([1.0] * 6 + [bad] + [1.0] * 3))
    assert moved(module) == [True] * 5 + [False] + [True] * 3
    assert guard.skipped_steps == 1 == int(run.callback_metrics["spike_guard/skipped_steps"])
    evidence = json.loads((tmp_path / "spikes" / "step00000006.rank0.json").read_text())
    assert evidence["batches"] == [{"batch_idx": 6, "ids": ["row 6"]}]
    norms = [float(evidence["gradient_norms"][name]) for name in ("first.weight", "first.bias", "second.weight")]
    total = float(evidence["gradient_norm"])
    rest = float(evidence["gradient_norms"]["second.bias"])
    if bad == 1000.0:
        assert math.sqrt(sum(n * n for n in [*norms, rest])) == pytest.approx(total)
    else:
        assert not math.isfinite(total)


def test_without_the_guard_the_same_step_moves_the_weights(tmp_path: Path) -> None:
    module = Scaled()
    Trainer(**QUIET, default_root_dir=tmp_path).fit(module, rows([1.0] * 6 + [1000.0] + [1.0]))
    assert moved(module) == [True] * 7


def test_a_window_of_micro_batches_is_judged_as_a_whole(tmp_path: Path) -> None:
    """The third window's second micro-batch is bad: that window is left out, its sum is not carried over."""
    guard, module = SpikeGuard(warmup_steps=2), Scaled()
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard], accumulate_grad_batches=2)
    run.fit(module, rows([1.0] * 5 + [math.nan] + [1.0] * 4))
    assert guard.skipped_steps == 1
    assert [not torch.equal(module.weights[i - 1], module.weights[i]) for i in (3, 5, 7, 9)] == [
        True,
        False,
        True,
        True,
    ]
    evidence = json.loads((tmp_path / "spikes" / "step00000002.rank0.json").read_text())
    assert [one["ids"] for one in evidence["batches"]] == [["row 4"], ["row 5"]]


def test_a_run_that_stays_bad_is_stopped(tmp_path: Path) -> None:
    guard = SpikeGuard(warmup_steps=2, stop_after=3)
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard])
    with pytest.raises(SpikesPersist, match=r"3 of the last 7 steps were wrong \(stop_after=3\), the last one: step 6"):
        run.fit(Scaled(), rows([1.0] * 4 + [math.nan] * 9))
    assert run.global_step == 6


def test_what_is_normal_survives_a_resume(tmp_path: Path) -> None:
    guard = SpikeGuard(warmup_steps=4)
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard])
    run.fit(Scaled(), rows([1.0] * 6))
    run.save_checkpoint(tmp_path / "last.ckpt")
    resumed, module = SpikeGuard(warmup_steps=4), Scaled()
    again = Trainer(**{**QUIET, "max_epochs": 2}, default_root_dir=tmp_path, callbacks=[resumed])
    again.fit(module, rows([1000.0] + [1.0] * 5), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.skipped_steps == 1


def test_what_is_normal_is_that_of_one_run(tmp_path: Path) -> None:
    """As in cross-validation, where a model starts anew with the callbacks of the last."""
    guard = SpikeGuard(warmup_steps=4)
    for scale, wrong in ((1.0, math.nan), (1000.0, 1000.0)):
        run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard])
        run.fit(Scaled(), rows([scale] * 6 + [wrong]))
        assert guard.skipped_steps == int(math.isnan(wrong))
    assert len(guard.state_dict()["recent"]) == 7


def test_a_trainer_that_goes_back_to_a_checkpoint_takes_its_counts(tmp_path: Path) -> None:
    guard = SpikeGuard(warmup_steps=4, stop_after=3)
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard])
    run.fit(Scaled(), rows([1.0] * 6))
    run.save_checkpoint(tmp_path / "good.ckpt")
    state = guard.state_dict()
    run.fit_loop.max_epochs = 2
    with pytest.raises(SpikesPersist):
        run.fit(Scaled(), rows([math.nan] * 6), ckpt_path=tmp_path / "good.ckpt")
    run.fit(module := Scaled(), rows([1.0, math.nan, 1.0]), ckpt_path=tmp_path / "good.ckpt")
    assert guard.skipped_steps == 1
    assert guard.state_dict()["recent"] == [*state["recent"], False, True, False]
    assert moved(module) == [False, True]


def test_a_step_that_an_earlier_fit_did_not_finish_is_discarded(tmp_path: Path) -> None:
    class Interrupted(Scaled):
        is_interrupted = True

        def on_after_backward(self) -> None:
            if self.is_interrupted and self.trainer.global_step == 4:
                raise ArithmeticError

    guard, module = SpikeGuard(warmup_steps=4), Interrupted()
    options = {"max_epochs": -1, "max_steps": 8, "accumulate_grad_batches": 2}
    run = Trainer(**QUIET | options, default_root_dir=tmp_path, callbacks=[guard])
    with pytest.raises(ArithmeticError):
        run.fit(module, rows([1.0] * 8 + [-1e6] * 2))
    module.is_interrupted = False
    run.fit(module, rows([1.0] * 10))
    assert guard.skipped_steps == 0


def test_losses_that_are_vectors_are_summed(tmp_path: Path) -> None:
    class Vectors(TwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
                losses = self.second(self.first(torch.ones(len(batch["scale"]), 4)))[:, 0] * batch["scale"]
                self.manual_backward(losses, gradient=torch.ones_like(losses))
                optimizer.step()

    guard, module = SpikeGuard(warmup_steps=2), Vectors()
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard])
    with pytest.warns(UserWarning, match="optimizer 0 loss is nan; optimizer 0 gradient norm is nan"):
        run.fit(module, rows([1.0] * 4 + [1.0, math.nan] + [1.0], batch_size=2))
    assert guard.skipped_steps == 2  # one of each optimizer


class TwoOptimizers(Scaled):
    """Manual optimization: one optimizer for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.firsts: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, scale in zip(self.optimizers(), (batch["scale"], torch.ones(1)), strict=True):
            optimizer.zero_grad()
            self.manual_backward(super().training_step({"scale": scale}, batch_idx))
            optimizer.step()
        self.firsts.append(self.first.weight.detach().clone())

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(layer.parameters(), lr=0.01, weight_decay=0.5) for layer in (self.first, self.second)]


def test_manual_optimization_judges_each_optimizer_by_itself(tmp_path: Path) -> None:
    guard, module = SpikeGuard(warmup_steps=2), TwoOptimizers()
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard])
    with pytest.warns(UserWarning, match="optimizer 0 loss is nan; optimizer 0 gradient norm is nan"):
        run.fit(module, rows([1.0] * 4 + [math.nan] + [1.0]))
    assert [not torch.equal(a, b) for a, b in zip(module.firsts, module.firsts[1:], strict=False)] == [
        True,
        True,
        True,
        False,
        True,
    ]
    assert moved(module) == [True] * 5


def test_steps_that_lightning_does_not_take_are_a_warning(tmp_path: Path) -> None:
    class Untaken(TwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers(use_pl_optimizer=False):  # type: ignore[union-attr]
                optimizer.step()

    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[SpikeGuard()])
    with pytest.warns(UserWarning, match=r"checked nothing: .* \(batches: 4\)"):
        run.fit(Untaken(), rows([1.0] * 4))


def test_infinite_gradients_under_a_scaler_are_the_scalers(tmp_path: Path) -> None:
    """The first scale is far too high for fp16's range: the scaler finds its own way down, unharmed by the guard."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    guard, module = SpikeGuard(warmup_steps=2), Scaled()
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard], plugins=[plugin])
    run.fit(module, rows([1.0] * 4 + [8.0] * 2))
    assert scaler.get_scale() < 2.0**127
    assert guard.skipped_steps == 0


def test_an_optimizer_without_a_learning_rate_is_guarded(tmp_path: Path) -> None:
    class Signs(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            return closure()

    class Untuned(Scaled):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Signs(self.parameters(), {})

    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[SpikeGuard(warmup_steps=2)])
    with pytest.warns(UserWarning, match="step 1: loss is nan"):
        run.fit(Untuned(), rows([1.0, math.nan, 1.0]))
    evidence = json.loads((tmp_path / "spikes" / "step00000001.rank0.json").read_text())
    assert evidence["learning_rates"] == [None]


def test_an_unwritable_folder_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    guard = SpikeGuard(warmup_steps=2, folder=tmp_path / "file" / "spikes")
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard])
    with pytest.warns(UserWarning, match="SpikeGuard cannot write its evidence to .* give folder="):
        run.fit(Scaled(), rows([1.0, math.nan, 1.0]))
    assert run.global_step == 3


def test_ids_that_cannot_be_had_are_a_warning(tmp_path: Path) -> None:
    guard = SpikeGuard(warmup_steps=2, ids=lambda batch: batch["name"])
    run = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[guard])
    with pytest.warns(UserWarning, match=r"SpikeGuard: cannot tell samples apart; look at ids= \(KeyError: 'name'\)"):
        run.fit(Scaled(), rows([1.0, math.nan, 1.0]))
    evidence = json.loads((tmp_path / "spikes" / "step00000001.rank0.json").read_text())
    assert evidence["batches"] == [{"batch_idx": 1, "ids": None}]


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="stop_after=0.*1 <= stop_after <= window"):
        SpikeGuard(stop_after=0)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
}


def on_two_ranks(folder: str, strategy: str) -> tuple[list[bool], int, dict[str, Any]]:
    """Rank 1 alone meets the bad sample."""
    guard, module = SpikeGuard(warmup_steps=2), Scaled()
    options = {"devices": 2, "strategy": STRATEGIES[strategy](), "use_distributed_sampler": False}
    run = Trainer(**QUIET, **options, default_root_dir=folder, callbacks=[guard])
    run.fit(module, rows([1.0] * 4 + [[1.0, 500.0][int(os.environ["RANK"])]] + [1.0] * 2))
    evidence = json.loads((Path(folder) / "spikes" / f"step00000004.rank{run.global_rank}.json").read_text())
    return moved(module), guard.skipped_steps, evidence


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_skip_together(tmp_path: Path, strategy: str) -> None:
    ranks = on_ranks(2, on_two_ranks, str(tmp_path), strategy, timeout=120)
    for has_moved, skipped, evidence in ranks:
        assert has_moved == [True, True, True, False, True, True]
        assert skipped == 1
        assert evidence["batches"] == [{"batch_idx": 4, "ids": ["row 4"]}]
        norms = [float(norm) for norm in evidence["gradient_norms"].values()]
        # Whichever rank holds what part of them.
        assert math.sqrt(sum(n * n for n in norms)) == pytest.approx(evidence["gradient_norm"])
        # The mean of gradients of scales 1 and 500, in multiples of the first step's; weights have hardly moved.
        assert evidence["gradient_norm"] / 2.24 == pytest.approx(250.5, rel=0.03)


class Normed(Scaled):
    """With norms on what the batch says, so that a NaN in it is in their running statistics."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.statistics = norm, []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        spread = torch.arange(4.0)[:, None] * batch["scale"].float()[:, None, None]
        return loss + self.norm(spread.expand(-1, 4, 4)).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.statistics.append([buffer.clone() for buffer in self.norm.buffers()])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.InstanceNorm1d(4, track_running_stats=True)),
    ],
)
def test_running_statistics_are_those_before_a_skipped_step(tmp_path: Path, make: Any) -> None:
    module, guard = Normed(make()), SpikeGuard(folder=tmp_path, warmup_steps=3)
    trainer = Trainer(**QUIET, callbacks=[guard], accumulate_grad_batches=2)
    with pytest.warns(UserWarning, match="the step is skipped"):
        trainer.fit(module, rows([1.0, 1.1] * 4 + [1.0, math.nan, 1e9, 1.0, 1.2, 1.0]))
    assert guard.skipped_steps == 2
    assert moved(module)[-2:] == [False, True]
    before, *skipped, after = (module.statistics[at] for at in (7, 9, 11, 13))
    for one in skipped:
        assert all(map(torch.equal, before, one))
    assert not any(map(torch.equal, before[:1], after[:1]))
    assert all(statistic.isfinite().all() for statistic in after)
    assert guard._statistics is None  # it holds the module's norms


def test_a_new_run_has_no_evidence_of_the_one_before(tmp_path: Path) -> None:
    """Which a report of its folder would show as its own; a trial keeps it."""

    def fit(values: list[float], **options: Any) -> list[str]:
        Trainer(**{**QUIET, **options}, callbacks=[SpikeGuard(folder=tmp_path)]).fit(Scaled(), rows(values))
        return sorted(path.name for path in tmp_path.iterdir())

    (tmp_path / "step.rank.json").touch()
    (tmp_path / "step00000009.rank1.json").touch()  # of a rank that this run does not have
    with pytest.warns(UserWarning, match="the step is skipped"):
        assert fit([1.0, math.nan]) == ["step.rank.json", "step00000001.rank0.json"]
    assert fit([1.0, 1.0], fast_dev_run=True) == ["step.rank.json", "step00000001.rank0.json"]
    assert fit([1.0, 1.0]) == ["step.rank.json"]


def test_a_resumed_run_keeps_the_evidence(tmp_path: Path) -> None:
    for until in (2, 3):
        run = Trainer(**{**QUIET, "max_epochs": until}, callbacks=[SpikeGuard(folder=tmp_path)])
        with pytest.warns(UserWarning, match="the step is skipped"):
            run.fit(Scaled(), rows([1.0, math.nan]), ckpt_path=None if until == 2 else tmp_path / "at.ckpt")
        run.save_checkpoint(tmp_path / "at.ckpt")
    assert [path.name[:12] for path in sorted(tmp_path.glob("*.json"))] == [f"step{n:08d}" for n in (1, 3, 5)]


def test_a_second_fit_warns_again() -> None:
    guard = SpikeGuard(ids=lambda batch: batch["name"])
    for _ in range(2):
        with pytest.warns(UserWarning, match="cannot tell samples apart"):
            Trainer(**QUIET, callbacks=[guard]).fit(Scaled(), rows([1.0]))
