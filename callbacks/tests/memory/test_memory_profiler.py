"""MemoryProfiler: its account against torch's own, its page, its files."""

import csv
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lit_callbacks import MemoryProfiler
from lit_callbacks.memory.memory_advice import settings, size_text
from lit_callbacks.memory.storage_ledger import Breakdown
from lit_callbacks.output.quantities import MIB
from plain_modules import VOCABULARY, Digits, TinyLM, digits, make_trainer, texts
from ranks import on_ranks
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.slow


class Wide(Digits):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in "123"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=False)


def fit(folder: Path, module: Any, data: Any, *more: Callback, **options: Any) -> tuple[MemoryProfiler, Trainer]:
    profiler = MemoryProfiler(folder / "memory", **options.pop("profiler", {}))
    trainer = make_trainer(folder, callbacks=[profiler, *more], log_every_n_steps=1, **options)
    trainer.fit(module, data, texts(2) if isinstance(module, TinyLM) else None)
    return profiler, trainer


class ByProfiler(Callback):
    """The same step seen by torch.profiler, which the CPU's allocator reports each block to."""

    def __init__(self, step: int) -> None:
        self.step, self.peak = step, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step - 1:
            # Blocks of before are not reported when they are freed, and nothing but the last gradients is.
            pl_module.zero_grad(set_to_none=True)
            states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
            self.before = sum(t.untyped_storage().nbytes() for t in [*pl_module.parameters(), *states, *batch])
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.profiler.__exit__(None, None, None)
            blocks: dict[int, int] = {}
            for event in sorted(allocations(self.profiler), key=lambda event: event.start_time_ns):
                block = event.extra_fields
                if block.alloc_size > 0:
                    blocks[block.ptr] = block.alloc_size
                # An earlier profiler of this process may have left sizes of blocks that lay here before: those are not.
                else:
                    blocks.pop(block.ptr, None)
                self.peak = max(self.peak, self.before + sum(blocks.values()))


def allocations(profiler: Any) -> list[Any]:
    """What the allocator reported, in torch's tree of events."""
    found, left = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        found += [event] if event.tag == _EventType.Allocation else []
    return found


@pytest.mark.parametrize("batch_size", [4, 512])
def test_the_account_is_the_allocators(tmp_path: Path, batch_size: int) -> None:
    """A small batch, where weights and state are most, and a large one, where activations are."""
    truth = ByProfiler(step=2)
    profiler = MemoryProfiler(tmp_path, sample_steps=[2], picture=False)
    # The truth begins first, so that it has freed the gradients, and ends last.
    trainer = make_trainer(tmp_path, callbacks=[truth, profiler])
    trainer.fit(Wide(), digits(batch_size * 3, batch_size))
    assert profiler.breakdown is not None
    assert profiler.breakdown.total == pytest.approx(truth.peak, rel=0.02)


def test_each_purpose_has_its_bytes(tmp_path: Path) -> None:
    profiler, _ = fit(tmp_path, Wide(), digits(1536, 512), profiler={"sample_steps": [2]})
    weights = 3 * (64 * 256 + 256 + 256 * 64 + 64) * 4
    breakdown = profiler.breakdown
    assert breakdown is not None
    assert breakdown.bytes["parameters"] == weights
    assert breakdown.bytes["optimizer_state"] == 2 * weights + 12 * 4  # two moments, and a step for each tensor
    assert breakdown.phase == "backward"
    # In the forward pass: of each block, both linear layers' outputs and GELU's.
    forward = 512 * 4 * 3 * (256 + 256 + 64)
    assert sum(size for _, _, size in breakdown.modules) == breakdown.bytes["activations"] <= forward + 2**12
    assert [(name, count) for name, count, _ in breakdown.modules[:2]] == [
        ("layers.*.*", 8),
        ("(outside of modules)", 1),
    ]
    assert breakdown.peaks["backward"] == breakdown.total
    assert breakdown.peaks["optimizer"] < breakdown.peaks["forward"] < breakdown.total


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_modules_are_compiled_after_the_sampled_steps(tmp_path: Path, fullgraph: bool) -> None:
    compiled_at: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled_at.append(trainer.global_step)
        return graph.forward

    module = Wide()
    module.layers = torch.compile(module.layers, backend=backend, fullgraph=fullgraph)  # type: ignore[assignment]
    profiler = MemoryProfiler(tmp_path, sample_steps=[1, 2], picture=False)
    trainer = make_trainer(tmp_path, callbacks=[profiler], max_steps=4)
    trainer.fit(module, digits(16, 4))
    assert compiled_at == [2]
    assert profiler.breakdown is not None
    assert profiler.breakdown.peaks["forward"] > profiler.breakdown.bytes["parameters"]


def test_a_forward_pass_that_fails_and_is_repeated(tmp_path: Path) -> None:
    """As by code that halves a batch on an out-of-memory error: later activations belong to their own modules."""

    class Repeats(Wide):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with suppress(RuntimeError):
                self.layers(batch[0][:, :3])
            return super().training_step(batch, batch_idx)

    once, again = (fit(tmp_path, kind(), digits(1536, 512))[0].breakdown for kind in (Wide, Repeats))
    assert once is not None
    assert again is not None
    assert once.modules == again.modules


def test_phases_are_logged(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2)
    profiler, trainer = fit(tmp_path, TinyLM(), texts(), saving, val_check_interval=4)
    phases = ("setup", "forward", "backward", "optimizer", "validation", "checkpoint")
    logged = {name for name in trainer.callback_metrics if name.startswith("memory/")}
    assert logged == {"memory/host_rss_mib", "memory/host_peak_rss_mib"} | {f"memory/{p}/host_rss_mib" for p in phases}
    assert all(float(trainer.callback_metrics[name]) > 10 for name in logged)
    assert [row["step"] for row in profiler.timeline] == list(range(1, 9))


def test_files_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profiler, _ = fit(tmp_path, TinyLM(), texts())
    with (tmp_path / "memory" / "memory_timeline.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 9)]
    assert float(rows[-1]["host_rss_mib"]) == profiler.timeline[-1]["host_rss_mib"]
    with (tmp_path / "memory" / "memory_step.csv").open() as file:
        moments = list(csv.DictReader(file))
    assert {moment["phase"] for moment in moments} >= {"forward", "backward", "optimizer"}
    assert profiler.breakdown is not None
    fullest = max(sum(float(value) for name, value in moment.items() if name.endswith("_mib")) for moment in moments)
    assert fullest == pytest.approx(profiler.breakdown.total / MIB, abs=0.001)
    assert (tmp_path / "memory" / "memory_timeline.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_that_is_stopped_keeps_its_timeline(tmp_path: Path) -> None:
    class Stopped(TinyLM):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(tmp_path, Stopped(), texts(), profiler={"picture": False})
    with (tmp_path / "memory" / "memory_timeline.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3"]
    assert (tmp_path / "memory" / "memory_step.csv").stat().st_size > 1000


class Full(TinyLM):
    """A device with room for three steps."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.trainer.global_step == self.steps:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        super().backward(loss, *args, **kwargs)

    steps = 3


@pytest.mark.parametrize(("steps", "when"), [(3, "optimizer step 2"), (0, "optimizer step 1, up to the error")])
def test_out_of_memory_is_explained_and_goes_on(tmp_path: Path, steps: int, when: str) -> None:
    module = Full()
    module.steps = steps
    with (
        pytest.warns(UserWarning, match=r"MemoryProfiler: Micro-batch helps most: about .* less .*out_of_memory_rank0"),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"),
    ):
        fit(tmp_path, module, texts(256, batch_size=64))
    page = (tmp_path / "memory" / "out_of_memory_rank0.md").read_text()
    assert "In the backward phase: CUDA out of memory. Tried to allocate 2.00 GiB." in page
    assert f"at its fullest ({when}, " in page
    for row in (
        "| micro-batch |",
        "| activation checkpointing |",
        "| chunked loss |",
        "| sharding |",
        "| activations |",
    ):
        assert row in page
    assert len(page.splitlines()) < 60
    assert "`layer" in page


def test_out_of_memory_outside_of_fit_is_not_explained_by_a_fit(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class Wide(TinyLM):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    run = make_trainer(tmp_path, callbacks=[MemoryProfiler(picture=False)])
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            run.validate(Wide(), texts())
        run.fit(TinyLM(), texts())
    assert not [warning for warning in recwarn if "MemoryProfiler" in str(warning.message)]
    assert not list((tmp_path / "memory").glob("*.md"))


def test_another_error_leaves_no_page(tmp_path: Path) -> None:
    class Wrong(TinyLM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        fit(tmp_path, Wrong(), texts())
    assert not (tmp_path / "memory").exists()
    assert torch.ones(2).add(1).sum() == 4  # no mode is left behind


def make_breakdown(**purposes: int) -> Breakdown:
    sizes: Any = {"parameters": 0, "gradients": 0, "optimizer_state": 0, "activations": 0, "other": 0, **purposes}
    modules = [("model.layers.*.mlp", 4, purposes.get("activations", 0))]
    return Breakdown(sizes, "backward", {}, modules, purposes.get("other", 0) // 2, dict.fromkeys("abcd", 10 * MIB))


def test_savings_by_hand() -> None:
    found = settings(make_breakdown(activations=800 * MIB, other=400 * MIB), ranks=1, is_sharded=False)
    assert [(setting.name, setting.saves / MIB) for setting in found] == [
        ("activation checkpointing", 800 - 40 - 200),  # less four outputs of layers and a quarter of the layers again
        ("micro-batch", (800 + 200) / 2),
        ("chunked loss", 200 * 7 / 8),
        ("sharding", 0),
    ]
    weights = make_breakdown(parameters=100 * MIB, gradients=100 * MIB, optimizer_state=200 * MIB)
    assert settings(weights, ranks=1, is_sharded=False)[0].saves == 200 * MIB
    assert settings(weights, ranks=8, is_sharded=False)[0].saves == 350 * MIB
    sharded = settings(weights, ranks=8, is_sharded=True)[0]
    assert (sharded.saves, sharded.how) == (200 * MIB, "weights, gradients and optimizer state over 16 devices")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.0 MiB"), (17, "17 B"), (1536, "1.5 KiB"), (MIB - 512, "1,023.5 KiB"), (3 * MIB // 2, "1.5 MiB")],
)
def test_small_sizes_have_a_small_unit(size: int, text: str) -> None:
    assert size_text(size) == text


def test_the_summary_of_a_small_model_has_its_sizes(tmp_path: Path) -> None:
    profiler, _ = fit(tmp_path, Digits(), digits())
    assert profiler.breakdown is not None
    weights = profiler.breakdown.bytes["parameters"]
    assert 1024 < weights < 51 * 1024  # in MiB with one decimal, 0.0
    assert f"parameters {weights / 1024:,.1f} KiB, " in profiler.describe()


def test_logits_are_known_by_their_width(tmp_path: Path) -> None:
    profiler, _ = fit(tmp_path, TinyLM(width=16), texts(24, batch_size=8, length=32), profiler={"sample_steps": [2]})
    assert profiler.breakdown is not None
    logits = 8 * 32 * VOCABULARY * 4
    assert profiler.breakdown.vocabulary_bytes >= logits


def test_a_leak_is_one_warning(tmp_path: Path) -> None:
    class Leaky(Digits):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            # 40 MiB: more than malloc ever serves from memory that was freed before.
            self.kept = [*getattr(self, "kept", []), torch.ones(10 * 2**20)]
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="MemoryProfiler: memory between steps grew by") as caught:
        fit(tmp_path, Leaky(), digits(48), profiler={"leak_mib": 16, "picture": False})
    assert len([w for w in caught if "memory between steps grew" in str(w.message)]) == 1


def test_no_leak_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    fit(tmp_path, Digits(), digits(48), profiler={"leak_mib": 16, "picture": False})
    assert [str(w.message) for w in recwarn if "MemoryProfiler" in str(w.message)] == []


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("a file")
    with pytest.warns(UserWarning, match=r"MemoryProfiler: cannot write the timeline \(FileExistsError: .*File exists"):
        _, trainer = fit(tmp_path, Digits(), digits())
    assert trainer.global_step == 8


@pytest.mark.parametrize("command", ["none", "fit", "validate"])
def test_a_device_without_snapshots_is_a_warning(tmp_path: Path, command: str) -> None:
    profiler = MemoryProfiler(tmp_path / "memory", picture=False)
    if command != "none":
        getattr(make_trainer(tmp_path, callbacks=[profiler]), command)(Digits(), digits())
    with pytest.warns(UserWarning, match="no memory snapshot: cpu has none"):
        assert profiler.snapshot(tmp_path / "snapshot.pickle") is False


def shards(folder: Path, strategy: str) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Sharded(Wide):
        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            if strategy == "fsdp2":
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    chosen: Any = ModelParallelStrategy(2, 1) if strategy == "fsdp2" else strategy
    profiler = MemoryProfiler(folder, sample_steps=[2], picture=False)
    trainer = make_trainer(folder, callbacks=[profiler], devices=2, strategy=chosen, max_steps=3)
    trainer.fit(Sharded(), digits(64, 8))
    assert profiler.breakdown is not None
    return profiler.breakdown.bytes


@pytest.mark.processes
def test_a_rank_counts_its_share(tmp_path: Path) -> None:
    weights = 3 * (64 * 256 + 256 + 256 * 64 + 64) * 4
    for strategy, ranks in (("ddp", 1), ("fsdp2", 2)):
        for found in on_ranks(2, shards, tmp_path, strategy, timeout=120):
            assert found["parameters"] == weights / ranks
            assert found["optimizer_state"] == 2 * weights / ranks + 12 * 4


@pytest.mark.parametrize("wrong", [{"sample_steps": 3}, {"sample_steps": [0]}, {"leak_mib": 0}])
def test_steps_and_sizes_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sample_steps is a list of steps counted from 1"):
        MemoryProfiler(**wrong)


def test_a_second_fit_warns_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profiler = MemoryProfiler(tmp_path / "file" / "memory")
    for _ in range(2):
        with pytest.warns(UserWarning, match="MemoryProfiler: cannot write the timeline"):
            make_trainer(tmp_path, callbacks=[profiler], max_steps=1).fit(Digits(), digits())
