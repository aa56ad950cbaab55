"""AdamW's state of a full fine-tuning in ``torch_dist``: by name and bit, and as Megatron-Core's optimizer loads it."""

import json
import shutil
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_line import here, recipe, run
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from torch.optim import AdamW, Optimizer
from torch.overrides import TorchFunctionMode
from torch.serialization import safe_globals

from lit_ft.checkpointing.storage.checkpoint_io import mapped
from lit_ft.internals.megatron_core import on_cpu
from lit_ft.megatron.checks import core_model
from lit_ft.megatron.conversion import to_hugging_face
from lit_ft.megatron.families import model_keys
from lit_ft.megatron.formats.safe_pickle import load
from lit_ft.megatron.formats.torch_dist import TorchDistSource
from lit_ft.megatron.layout import Layout
from lit_ft.megatron.mapping import AsHuggingFace
from lit_ft.megatron.optimizer_state import FORM, obstacle, prefix_of
from lit_ft.megatron.shape import ModelShape
from lit_ft.model.loading import load_config
from lit_ft.protocols import Checkpoint
from lit_ft.training.optimizers.initial_state import FOLDER, MOMENTS, SETTINGS

STATES = ("param", "exp_avg", "exp_avg_sq")
STEPS = 2


@pytest.fixture(scope="module")
def run_dir(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run that trained all weights with AdamW."""
    folder = tmp_path_factory.mktemp("full")
    with pytest.MonkeyPatch.context() as patched:
        here(patched, *full_fine_tuning(folder, model_folder, STEPS))
    return folder / "run"


def full_fine_tuning(folder: Path, model: str, steps: int) -> list[str]:
    """Command that trains all weights with AdamW, into ``folder / "run"``."""
    rows = [{"prompt": f"{a} + {b} =", "completion": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "rows.json").write_text(json.dumps(rows))
    options = ("--run_dir", str(folder / "run"), "--trainer.max_steps", str(steps), "--model.peft", "null")
    adamw = ("--optimizer", "torch.optim.AdamW", "--optimizer.lr", "1e-2", "--optimizer.betas", "[0.9, 0.95]")
    return [*recipe(folder, model, str(folder / "rows.json")), *options, *adamw]


@pytest.fixture(scope="module")
def checkpoint(run_dir: Path) -> Checkpoint:
    return mapped(run_dir / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def converted(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint made of the run."""
    out = tmp_path_factory.mktemp("state") / "ckpt"
    with pytest.MonkeyPatch.context() as patched:
        here(patched, *convert(run_dir, out))
    return out


def convert(run_dir: Path, out: Path, *options: str) -> tuple[str, ...]:
    command = ("convert", "model", "--from", "hf", "--to", "megatron", str(run_dir), "--out", str(out))
    return (*command, "--verify", "reduced", *options)


def states_in(folder: Path, shape: ModelShape) -> dict[tuple[str, str], Tensor]:
    """All states in a Megatron checkpoint, by state and Hugging Face's name of the weight."""
    found = {}
    for state in STATES:
        tensors = AsHuggingFace(TorchDistSource(folder, prefix_of(state)), shape, str(folder), "like")
        found |= {(state, info.name): tensors.read(info.name) for info in tensors.tensors()}
    return found


@pytest.mark.slow
def test_state_is_that_of_the_run(model_folder: str, checkpoint: Checkpoint, converted: Path) -> None:
    shape = ModelShape.of(load_config(model_folder), "model")
    found = states_in(converted / f"iter_{STEPS:07d}", shape)
    of_run = states_of(checkpoint)
    assert len(found) == 3 * len(of_run)
    for (state, name), tensor in found.items():
        expected = checkpoint["state_dict"][f"model.{name}"] if state == "param" else of_run[f"model.{name}"][state]
        assert torch.equal(tensor, expected), (state, name)
    assert (converted / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    options = (converted / "megatron_arguments.txt").read_text().splitlines()
    assert {"--use-distributed-optimizer", f"--tokenizer-model {converted}"} <= set(options)
    common = load(converted / f"iter_{STEPS:07d}" / "common.pt")
    assert common["iteration"] == STEPS
    decays = [
        (group["wd_mult"], group["step"], group["betas"]) for group in common["optimizer"]["optimizer"]["param_groups"]
    ]
    assert decays == [(1.0, STEPS, (0.9, 0.95)), (0.0, STEPS, (0.9, 0.95))]


@pytest.mark.slow
def test_a_state_of_the_optimizer_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    here(monkeypatch, *convert(run_dir, tmp_path / "ckpt", "--optimizer_state", "false"))
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert not TorchDistSource(tmp_path / "ckpt" / "release").has_optimizer
    here(monkeypatch, *convert(run_dir, tmp_path / "legacy", "--format", "torch"))
    assert "the optimizer's state is not converted: the format torch divides it among ranks" in caplog.text


def test_states_that_are_not_converted(model_folder: str, checkpoint: Checkpoint) -> None:
    shape = ModelShape.of(load_config(model_folder), "model")
    assert obstacle(checkpoint, shape) is None
    states, names = checkpoint["optimizer_states"][0]["state"], checkpoint["optimizer_names"][0]

    def reason(names: list[str], states: dict[int, Any]) -> str | None:
        return obstacle({"optimizer_names": [names], "optimizer_states": [{"state": states}]}, shape)

    assert reason(names, {}) == "the checkpoint does not hold one state for each weight"
    assert reason(["lora_A"], {0: states[0]}) == "an adapter's has nothing of the model's weights"
    said = reason(names[1:], {number: states[number] for number in range(1, len(names))})
    assert said == f"1 of {len(names)} weights do not train, and Megatron keeps a state of all"
    said = reason(names, {number: {"momentum_buffer": torch.zeros(1)} for number in states})
    assert said == "the optimizer keeps momentum_buffer, and Megatron's exp_avg, exp_avg_sq"
    said = reason(names, {number: {**state, "step": torch.tensor(number)} for number, state in states.items()})
    assert said == "its weights are not all at the same step"


def states_of(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """State of the optimizer, by name of the weight."""
    names = checkpoint["optimizer_names"][0]
    return {name: checkpoint["optimizer_states"][0]["state"][number] for number, name in enumerate(names)}


@pytest.fixture(scope="module")
def back(model_folder: str, converted: Path) -> Path:
    """Hugging Face folder made of the checkpoint."""
    to_hugging_face(converted, model_folder, converted.with_name("back"), "reduced")
    return converted.with_name("back")


@pytest.mark.slow
def test_a_run_starts_with_the_moments(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, back: Path, tmp_path: Path
) -> None:
    start = ("--trainer.callbacks+", "lit_ft.InitialAdamState", "--trainer.callbacks.folder", str(back))
    here(monkeypatch, *full_fine_tuning(tmp_path, str(back), 1), *start)
    before, after = states_of(checkpoint), states_of(mapped(tmp_path / "run" / "checkpoints" / "last.ckpt"))
    for name, state in after.items():
        assert state["step"] == STEPS + 1
        # One step of AdamW from these moments: both are those of the same gradient.
        gradient = (state["exp_avg"] - 0.9 * before[name]["exp_avg"]) / 0.1
        square = (state["exp_avg_sq"] - 0.95 * before[name]["exp_avg_sq"]) / 0.05
        torch.testing.assert_close(gradient**2, square, atol=1e-5 * float(square.max()), rtol=1e-3)


@pytest.mark.slow
def test_moments_that_cannot_be_taken(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, model_folder: str, back: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("lit_ft.model.loading.load_base", lambda *_, **__: pytest.fail("weights were loaded"))

    def start(folder: object, *options: str) -> str:
        named = ("--trainer.callbacks+", "lit_ft.InitialAdamState", "--trainer.callbacks.folder", str(folder))
        return run(capsys, *full_fine_tuning(tmp_path, model_folder, 1), *named, *options, code=2)

    assert "holds no settings.json; name a folder of `convert model --to hf`" in start(model_folder)
    assert "is for torch.optim.AdamW, not SGD" in start(back, "--optimizer", "torch.optim.SGD", "--optimizer.lr", "0.1")
    adapter = ("--model.peft", "peft.LoraConfig", "--model.peft.target_modules", "[q_proj]")
    assert "q_proj.lora_A.default.weight is missing in" in (said := start(back, *adapter))
    assert "train all weights (peft: null)" in said
    shutil.copytree(back, tmp_path / "other")
    moments = tmp_path / "other" / FOLDER / "exp_avg" / "model.safetensors"
    save_file({**load_file(moments), "model.norm.weight": torch.zeros(3)}, moments)
    assert "exp_avg of model.norm.weight is (3,) in" in start(tmp_path / "other")


class CudaOnCpu(TorchFunctionMode):
    """Mode in which tensors that are made on CUDA are on the CPU, and those on the CPU say that they are on CUDA."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        answer = function(*args, **options)
        is_name = function is Tensor.type and len(args) == 1 and not options
        return answer.replace("torch.", "torch.cuda.") if is_name else answer


def load_and_save_by_core(source: Path, shape: ModelShape, layout: Layout, to: Path) -> dict[str, Any]:
    """Let Megatron-Core's distributed optimizer load a checkpoint as Megatron-LM does, and save what it then holds."""
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    with ExitStack() as patches:
        for context in (on_cpu(), CudaOnCpu(), safe_globals([Namespace])):
            patches.enter_context(context)
        # Adam of Apex and Transformer Engine keeps the step in its groups; torch's stands in for it, and takes no step.
        for name in ("HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER"):
            patches.enter_context(patch.object(distrib_optimizer, name, True))
        patches.enter_context(patch.object(AdamW, "__setstate__", Optimizer.__setstate__))
        (module,) = core_model.build(shape, layout, layout.padded(shape.vocabulary), initialize=True)
        data_parallel = DistributedDataParallelConfig(use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(module.config, data_parallel, module)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0, use_distributed_optimizer=True), [wrapped])
        common = dist_checkpointing.load_common_state_dict(str(source))
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        model = {"model": module.sharded_state_dict(metadata=metadata)}
        sharded = optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)
        loaded = dist_checkpointing.load({**model, "optimizer": sharded}, str(source))
        module.load_state_dict(loaded["model"], strict=True)
        optimizer.load_state_dict(loaded["optimizer"])
        to.mkdir(exist_ok=True)
        model = {"model": module.sharded_state_dict(metadata=metadata)}
        content = {**model, "optimizer": optimizer.sharded_state_dict(model, metadata=metadata)}
        dist_checkpointing.save(content, str(to), content_metadata=metadata)
        groups = [(group["step"], group["betas"], group["lr"]) for group in optimizer.param_groups]
    distributed.barrier()
    distributed.destroy_process_group()
    return {"form": metadata["distrib_optim_sharding_type"], "groups": groups}


@pytest.mark.skipif(not core_model.is_installed(), reason="needs megatron-core (extra megatron)")
@pytest.mark.processes
@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)], ids=["tp2-dp2", "pp2-dp2"])
def test_megatron_cores_optimizer_loads_it(model_folder: str, converted: Path, tmp_path: Path, layout: Layout) -> None:
    import megatron.core.models.gpt  # noqa: F401  # before the ranks are forked

    shape, source = ModelShape.of(load_config(model_folder), "model"), converted / f"iter_{STEPS:07d}"
    results = on_ranks(4, load_and_save_by_core, source, shape, layout, tmp_path / "again")
    assert results == [{"form": FORM, "groups": [(STEPS, (0.9, 0.95), 0.01)] * 2}] * 4
    expected, again = states_in(source, shape), states_in(tmp_path / "again", shape)
    keys = list(model_keys(shape.family, shape.layers, shape.experts, shape.is_tied))
    assert len(again) == 3 * sum(len(key.weight.parts) for key in keys)
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    assert all(tensor.any() for (state, _), tensor in expected.items() if state != "param")
    to_hugging_face(tmp_path / "again", model_folder, tmp_path / "back", "reduced")
    settings = json.loads((tmp_path / "back" / FOLDER / SETTINGS).read_text())
    assert (settings["step"], settings["betas"]) == (STEPS, [0.9, 0.95])
    for moment in MOMENTS:
        tensors = load_file(tmp_path / "back" / FOLDER / moment / "model.safetensors")
        assert all(torch.equal(tensor, expected[moment, name]) for name, tensor in tensors.items())
