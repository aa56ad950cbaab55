"""What a layout costs: formulas against numbers worked out by hand, against torch's order of work, and against runs."""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from peft import LoraConfig
from ranks import LiveRanks
from shared_fixtures import tiny_qwen2
from torch import nn
from transformers import DeepseekV3Config

from benchmarks.parallel.parallel_bytes import measure, save_config
from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.cli import main
from lit_ft.commands.plan import in_groups, pretended_rank
from lit_ft.internals.torch import HAS_ZERO_BUBBLE
from lit_ft.model.loading import decoder_layers
from lit_ft.planning import communication_formulas, timeline_plot
from lit_ft.planning.communication import key_value_width
from lit_ft.planning.memory import Memory, memory_of, optimizer_bytes
from lit_ft.planning.pipeline_timeline import Work, idle_fraction, most_in_flight, order, timeline
from lit_ft.planning.report import MIB
from lit_ft.strategies import FSDPStrategy, ModelParallelStrategy
from lit_ft.strategies.parallel.pipeline_parallel import SCHEDULES, stages_per_rank
from lit_ft.training.optimizers.configure import SplitOptimizer, hidden_matrices

# --- arithmetic ------------------------------------------------------------------------------------------


def test_bubble_share() -> None:
    assert communication_formulas.bubble_fraction(4, 8) == 3 / 11
    assert communication_formulas.bubble_fraction(4, 8, stages_per_rank=2) == 3 / 19
    assert communication_formulas.bubble_fraction(1, 8) == 0


def test_a_ring_of_four() -> None:
    assert communication_formulas.gathered(100, 4) == 75  # three of four quarters pass each rank
    assert communication_formulas.reduced(100, 4) == 150
    assert communication_formulas.reduced(100, 1) == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_blocks_of_a_layer_that_trains_send_four_reductions_of_the_stream(sequence_parallel: bool) -> None:
    # Narayanan et al. 2021, section 3.2: 8 b s h (t - 1) / t numbers for each layer.
    sent = communication_formulas.block_bytes(1000, 4, blocks=2, into=2, out=2, sequence_parallel=sequence_parallel)
    assert sent == 8 * 1000 * 3 / 4


def test_blocks_before_which_nothing_trains() -> None:
    # LoRA's first layer: the attention's input needs no gradient, the MLP's does.
    assert communication_formulas.block_bytes(1000, 2, blocks=2, into=1, out=2) == 3 * 1000
    assert communication_formulas.block_bytes(1000, 2, blocks=2, into=1, out=2, sequence_parallel=True) == 7 * 500


def test_blocks_that_are_computed_again() -> None:
    # The attention's sum again; with sequence parallelism both blocks' inputs and the attention's result.
    assert communication_formulas.block_bytes(1000, 2, 2, 2, 2, recomputed=1) == 5 * 1000
    assert communication_formulas.block_bytes(1000, 2, 2, 2, 2, recomputed=1, sequence_parallel=True) == 11 * 500


def test_head() -> None:
    gradient = 10 * 64  # 10 tokens of 64 bytes, reduced over 2 ranks
    assert (
        communication_formulas.head_bytes(10, 64, 2, vocabulary=300, loss_parallel=False) == gradient + 10 * 300 * 4 / 2
    )
    # Three reductions of a float; of each rank's best logit, a float, its place, an int64.
    assert communication_formulas.head_bytes(10, 64, 2, vocabulary=300) == gradient + 3 * 10 * 4 + 10 * (4 + 8)


def test_context_and_experts() -> None:
    assert communication_formulas.context_bytes(1000, 4, layers=3, back=2, recomputed=1) == 6 * 750
    assert communication_formulas.expert_bytes(10, 2, 64, ranks=4) == 2 * 10 * 2 * 64 * 3 / 4


def test_elements_of_keys_and_values() -> None:
    assert key_value_width(tiny_config("qwen2")) == 2 * 2 * 16
    config = tiny_config("deepseek_v3")
    latent = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    assert key_value_width(config) == latent
    assert key_value_width(DeepseekV3Config()) == 128 * (192 + 128)


# --- timeline -------------------------------------------------------------------------------------------


def test_1f1b_by_hand() -> None:
    first, last = timeline("1F1B", 2, 2)
    assert first == [
        Work("F", 0, 0, 0, 1),
        Work("F", 0, 1, 1, 2),
        Work("B", 0, 0, 4, 6),
        Work("B", 0, 1, 7, 9),
    ]
    assert last == [Work("F", 1, 0, 1, 2), Work("B", 1, 0, 2, 4), Work("F", 1, 1, 4, 5), Work("B", 1, 1, 5, 7)]
    assert idle_fraction([first, last]) == pytest.approx(1 / 3)
    assert (most_in_flight(first), most_in_flight(last)) == (2, 1)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 16)])
def test_the_formula_is_what_the_order_gives(schedule: str, ranks: int, count: int) -> None:
    found = idle_fraction(timeline(schedule, ranks, count))
    assert found == pytest.approx(communication_formulas.bubble_fraction(ranks, count, stages_per_rank(schedule)))


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 16)])
def test_zero_bubble_schedules_wait_for_forward_passes_only(schedule: str, ranks: int, count: int) -> None:
    # Each rank has 2 m pieces of three parts, and waits p - 1 parts (Qi et al. 2024, section 2.3).
    assert idle_fraction(timeline(schedule, ranks, count)) == pytest.approx((ranks - 1) / (6 * count + ranks - 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_passes_every_stage_once_each_way(schedule: str) -> None:
    work = [piece for of_rank in order(schedule, 2, 8) for piece in of_rank]
    places = [(stage, k) for stage in range(2 * stages_per_rank(schedule)) for k in range(8)]
    assert sorted((stage, k) for kind, stage, k in work if kind == "F") == places
    assert sorted((stage, k) for kind, stage, k in work if kind in "BI") == places
    assert sorted((stage, k) for kind, stage, k in work if kind in "BW") == places


def test_too_few_micro_batches() -> None:
    with pytest.raises(RecipeError, match="schedule=DualPipeV: DualPipeV requires at least as many microbatches as"):
        timeline("DualPipeV", 4, 4)


# --- memory ----------------------------------------------------------------------------------------------


def test_state_of_an_optimizer_of_two_is_counted(model_folder: str) -> None:
    muon = partial(torch.optim.Muon, lr=0.1)
    module = CausalLM(model_folder, optimizer=partial(SplitOptimizer, matrices=muon, others=torch.optim.AdamW))
    module.model = module.check()
    weights = list(module.parameters())
    matrices = hidden_matrices(module)
    others = [weight for weight in weights if weight not in matrices]
    expected = sum(weight.numel() for weight in matrices) + sum(2 * weight.numel() + 1 for weight in others)
    assert optimizer_bytes(in_groups(module), weights) == 4 * expected


def test_optimizer_state_is_counted_without_weights() -> None:
    weights = [nn.Parameter(torch.empty(3, 5, device="meta")), nn.Parameter(torch.empty(7, device="meta"))]
    assert optimizer_bytes(torch.optim.AdamW, weights) == 2 * 22 * 4 + 2 * 4  # two moments, and a step count each
    assert optimizer_bytes(lambda p: torch.optim.SGD(p, lr=0.1), weights) == 0
    assert optimizer_bytes(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), weights) == 22 * 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_memory_under_fsdp(model_folder: str, accumulate: int) -> None:
    with pretended_rank(0, 4):
        strategy = FSDPStrategy()
        trainer = Trainer(
            accelerator="cpu", devices=4, strategy=strategy, accumulate_grad_batches=accumulate, logger=False
        )
        module = CausalLM(model_folder)
        module.trainer, module.model = trainer, module.check()
        strategy._lightning_module = strategy.model = module
        strategy.setup_environment()
        strategy.shard(module)
        layers = decoder_layers(module.base_model)
        weights = list(module.parameters())
        found = memory_of(strategy.layout(), weights, layers, torch.optim.AdamW, 5, accumulates=accumulate > 1)
    whole = 4 * sum(p.numel() for p in module.check().parameters())
    # Every first dimension is a multiple of 4, so the shards are quarters; of two layers, both are gathered at a time.
    steps = 4 * len(list(module.parameters()))
    assert found == Memory(whole / 4, whole, whole / 4 if accumulate == 1 else whole, 2 * whole / 4 + steps, 5)
    assert found.total == sum(vars(found).values())


# --- against runs ----------------------------------------------------------------------------------------

P, T, D, C = "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size", "context_parallel_size"
LORA = {"peft": LoraConfig(r=4, target_modules="all-linear")}
SCHEDULE = "ZBVZeroBubble" if HAS_ZERO_BUBBLE else "Interleaved1F1B"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "model"),
    [
        pytest.param({T: 2}, LORA, id="tensor"),
        pytest.param({T: 2, "sequence_parallel": True}, {"gradient_checkpointing": True}, id="sequence"),
        pytest.param({T: 2, "loss_parallel": False}, {}, id="whole_logits"),
        pytest.param({P: 2, "schedule": SCHEDULE}, LORA, id="pipeline"),
        pytest.param({P: 2, D: 2}, {}, id="pipeline_and_data"),
        pytest.param({D: 2, T: 2}, LORA, id="data_and_tensor"),
        pytest.param({C: 2, T: 2}, LORA, id="context"),
    ],
)
def test_what_is_sent_is_what_the_formulas_say(
    live_ranks: LiveRanks, tmp_path: Path, options: dict[str, Any], model: dict[str, Any]
) -> None:
    world = 4 if len({P, T, D, C} & set(options)) > 1 else 2
    for sent, planned in live_ranks(world, measure, save_config(tmp_path), options, model, timeout=100):
        # Where all ranks are one group, the gradient norm's few bytes are along it as well.
        assert sent == {kind: pytest.approx(count, abs=16) for kind, count in planned.items()}


# --- command ---------------------------------------------------------------------------------------------


def plan(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    return stopped.value.code  # type: ignore[return-value]


@pytest.fixture
def recipe(tmp_path: Path, model_folder: str) -> str:
    path = tmp_path / "recipe.yaml"
    strategy = {
        "class_path": "lit_ft.strategies.ModelParallelStrategy",
        "init_args": {P: 2, T: 2, "schedule": "1F1B", "num_microbatches": 4},
    }
    content = {
        "model": {"pretrained": model_folder},
        "data": {"path": str(tmp_path / "none.json"), "max_length": 64, "micro_batch_size": 4},
        "trainer": {"strategy": strategy, "devices": 2, "num_nodes": 2, "accelerator": "cuda"},
    }
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_plan_of_a_machine_that_is_not_here(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--config", recipe) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layout: pipeline 2 x tensor 2 = 4 ranks, loss parallel"
    assert lines[1] == "schedule: 1F1B, p=2 ranks, m=4 micro-batches: bubble 20.0% ((p-1)/(m+p-1) is 20.0%)"
    assert lines[2].endswith("at most 1 x 256 tokens a replica:")
    first, last = (line.split() for line in lines[4:6])
    # Attention's matrices and biases and those of the MLP are halved; both norms are whole.
    layer = (48 * 48 * 2 + 48 * 24 * 2 + 48 + 24 + 24 + 3 * 48 * 96) // 2 + 2 * 48
    assert first[:4] == ["0-1", "embedding,", "0", f"{384 * 48 // 2 + layer:,}"]
    assert last[:4] == ["2-3", "1,", "head", f"{384 * 48 // 2 + layer + 48:,}"]


@pytest.mark.parametrize("strategy", [(), ("--trainer.strategy", "auto", "--devices", "1", "--num_nodes", "1")])
def test_a_batch_of_answers(recipe: str, capsys: pytest.CaptureFixture[str], strategy: tuple[str, ...]) -> None:
    policy = ["--model", "lit_ft.PolicyLM", "--model.rewards", "[lit_ft.ExactAnswer]", "--model.max_new_tokens", "36"]
    content = yaml.safe_load(Path(recipe).read_text())
    data = content["data"]
    assert plan("--config", recipe, *policy, "--model.answers_per_prompt", "3", *strategy) == 0
    tokens = data["micro_batch_size"] * 3 * (data["max_length"] + 36)
    assert f" {tokens:,} tokens" in capsys.readouterr().out


def test_a_teacher_is_on_each_rank(recipe: str, model_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    of_teacher = 4 * sum(p.numel() for p in tiny_qwen2()[0].parameters()) / MIB
    alone = ["--config", recipe, "--trainer.strategy", "auto", "--devices", "1", "--num_nodes", "1"]
    assert plan(*alone) == 0
    needed = float(capsys.readouterr().out.splitlines()[4].split()[-1])
    memory = ["--memory_gib", str((needed + of_teacher / 2) / 1024)]
    assert plan(*alone, *memory) == 0
    capsys.readouterr()
    plan(*alone, *memory, "--model", "lit_ft.DistillationLM", "--model.teacher", model_folder)
    *_, said, result = capsys.readouterr().out.splitlines()
    assert said == f"the teacher has {of_teacher:,.1f} MiB of weights more on each rank"
    assert result.startswith("does not fit")
    taught = ["--model", "lit_ft.DistillationLM", "--model.teacher", model_folder, "--model.shard_teacher", "true"]
    plan(*alone[:2], "--trainer.strategy", "ddp", "--devices", "4", "--num_nodes", "1", *taught)
    shared = 4 * sum(p.numel() for p in tiny_qwen2()[0].model.layers.parameters()) / MIB
    assert f"the teacher has {of_teacher - shared * 3 / 4:,.1f} MiB" in capsys.readouterr().out


@pytest.mark.processes
def test_plan_says_what_the_run_says(
    live_ranks: LiveRanks, recipe: str, model_folder: str, write_rows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--config", recipe) == 0
    planned = capsys.readouterr().out.splitlines()
    for said in live_ranks(4, describe, model_folder, write_rows(), timeout=100):
        assert said.splitlines() == planned[: len(said.splitlines())]


def describe(folder: str, data: str) -> str:
    strategy = ModelParallelStrategy(2, 2, num_microbatches=4, timeout=timedelta(seconds=60))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy, max_steps=1, **quiet)  # type: ignore[arg-type]
    trainer.fit(CausalLM(folder), TextDataModule(data, max_length=64, micro_batch_size=4))
    return strategy.describe()


def test_devices_of_the_command_line_count(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--config", recipe, "--devices", "8", "--num_nodes", "1") == 0
    assert "layout: pipeline 2 x data 2 x tensor 2 = 8 ranks" in capsys.readouterr().out


def test_sizes_that_do_not_fit(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--config", recipe, "--devices", "3", "--num_nodes", "1") == 2
    assert "must make 3 ranks" in capsys.readouterr().err


def test_devices_without_a_number(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--config", recipe, "--trainer.devices", "auto") == 2
    assert "give one with --devices N" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_picture_of_every_schedule(tmp_path: Path, schedule: str) -> None:
    path = tmp_path / "schedule.svg"
    timeline_plot.draw(timeline(schedule, 2, 4), path, f"title of {schedule}")
    text = path.read_text()
    boxes = 4 * 2 * stages_per_rank(schedule) * (3 if "Zero" in schedule else 2)
    if schedule != "DualPipeV":  # splits some backward passes only
        assert text.count("#ffffff; stroke-linejoin: miter") >= boxes
    assert f"title of {schedule}" in text


def test_a_picture_needs_a_suffix(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"schedule cannot be written \(its name has no suffix\)"):
        timeline_plot.draw(timeline("GPipe", 2, 2), tmp_path / "schedule", "")


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RecipeError, match=r"pip install -e '\.\[plots\]'"):
        timeline_plot.draw(timeline("GPipe", 2, 2), tmp_path / "schedule.png", "")


def memory_line(text: str) -> list[float]:
    """Numbers of the only line of the table of memory, MiB: weights, gathered, gradients, optimizer, inputs, sum."""
    lines = text.splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("ranks")) + 1
    return [float(cell.replace(",", "")) for cell in lines[row].split()[1:]]


MODEL = 4 * (384 * 48 + 2 * 20_928 + 48) / 2**20  # embedding, two layers, last norm
"""MiB of the test model in float32; all of it trains."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "weights", "gathered", "gradients", "optimizer"),
    [
        (["auto", "--devices", "1"], 1, 0, 1, 2),
        (["ddp", "--devices", "4"], 1, 0, 2, 2),
        # ZeRO's optimizer also holds a float32 copy of the weights. Stage 3 keeps up to 1e9 weights gathered.
        (["DeepSpeedStrategy", "--trainer.strategy.stage", "1", "--devices", "4"], 1, 0, 1, 3 / 4),
        (["DeepSpeedStrategy", "--trainer.strategy.stage", "2", "--devices", "4"], 1, 0, 1 / 4, 3 / 4),
        (["DeepSpeedStrategy", "--trainer.strategy.stage", "3", "--devices", "4"], 1 / 4, 1, 1 / 4, 3 / 4),
    ],
    ids=["one device", "ddp", "zero 1", "zero 2", "zero 3"],
)
def test_memory_of_replicas(
    recipe: str,
    capsys: pytest.CaptureFixture[str],
    strategy: list[str],
    weights: float,
    gathered: float,
    gradients: float,
    optimizer: float,
) -> None:
    chosen = strategy[0].replace("DeepSpeed", "lit_ft.strategies.DeepSpeed")
    assert plan("--config", recipe, "--num_nodes", "1", "--trainer.strategy", chosen, *strategy[1:]) == 0
    inputs = 2 * 256 * 48 * 4 / 2**20  # two layers, a packed batch of 256 tokens, a hidden size of 48
    expected = [weights * MODEL, gathered * MODEL, gradients * MODEL, optimizer * MODEL, inputs]
    assert memory_line(capsys.readouterr().out) == pytest.approx([*expected, sum(expected)], abs=0.06)


def test_half_precision_and_offloading_under_zero(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trainer.strategy.stage", "2", "--trainer.strategy.offload_optimizer", "true"]
    options += ["--trainer.precision", "bf16-mixed", "--devices", "2", "--num_nodes", "1"]
    assert plan("--config", recipe, "--trainer.strategy", "lit_ft.strategies.DeepSpeedStrategy", *options) == 0
    out = capsys.readouterr().out
    assert memory_line(out)[:4] == pytest.approx([MODEL / 2, 0, MODEL / 4, 0], abs=0.06)
    assert "in host memory, and not counted: optimizer" in out


def test_does_it_fit(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--config", recipe, "--trainer.strategy", "auto", "--devices", "1", "--num_nodes", "1"]
    assert plan(*one, "--memory_gib", "24") == 0
    assert "fits: 0.00099 GiB of 24.00 GiB; 24.00 GiB are left for activations, logits and buffers" in (
        capsys.readouterr().out
    )
    assert plan(*one, "--memory_gib", "0.0005") == 1
    assert "does not fit: 0.00099 GiB of 0.0005 GiB, before activations" in capsys.readouterr().out


def test_whether_a_quantized_base_fits_is_open_until_the_rest_does_not(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ["--config", recipe, "--trainer.strategy", "auto", "--devices", "1", "--num_nodes", "1"]
    one += ["--config", "recipes/tuning/qlora_nf4.yaml"]
    assert plan(*one) == 0
    *parts, total = memory_line(capsys.readouterr().out)
    rest = total - parts[0] - parts[1]
    assert rest > 0
    assert plan(*one, "--memory_gib", str((rest + 0.1) / 1024)) == 0
    assert "may fit: " in capsys.readouterr().out
    assert plan(*one, "--memory_gib", str((rest - 0.1) / 1024)) == 1
    assert "GiB without any weights, before activations" in capsys.readouterr().out


def test_plan_of_answers(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--config", recipe, "--trainer.strategy", "auto", "--devices", "1", "--num_nodes", "1"]
    policy = ["--model", "lit_ft.PolicyLM", "--model.rewards", "[lit_ft.ExactAnswer]", "--model.max_new_tokens", "36"]
    assert plan(*one, *policy) == 0
    out = capsys.readouterr().out
    assert "a packed batch has at most 3,200 tokens" in out  # 4 prompts of 64 tokens, 8 answers of 36 to each
    assert "keys and values of the answers that are generated together (model.answers_at_once) come on top" in out
    assert "RewardModel" not in out
    judged = "[{class_path: lit_ft.RewardModel, init_args: {pretrained: x}}]"
    assert plan(*one, *policy, "--model.rewards", judged) == 0
    assert "so do the weights of RewardModel (model.rewards)" in capsys.readouterr().out
    assert plan(*one) == 0
    assert "answers" not in capsys.readouterr().out


@pytest.mark.parametrize(("option", "count"), [("--devices", "0"), ("--num_nodes", "0"), ("--num_nodes", "-1")])
def test_a_layout_has_a_rank(recipe: str, capsys: pytest.CaptureFixture[str], option: str, count: str) -> None:
    assert plan("--config", recipe, option, count) == 2
    assert f"{option} {count} must be 1 or more" in capsys.readouterr().err


def test_plan_of_a_strategy_that_it_does_not_know(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(Path(recipe).read_text())
    content["trainer"] |= {"strategy": {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}}
    Path(recipe).write_text(yaml.safe_dump(content))
    assert plan("--config", recipe) == 2
    assert "trainer.strategy is ModelParallelStrategy; name one of them" in capsys.readouterr().err


def test_a_picture_needs_a_pipeline(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = "--trainer.strategy.init_args.pipeline_parallel_size=1"
    assert plan("--config", recipe, size, "--draw", str(tmp_path / "s.png")) == 2
    assert "pipeline_parallel_size=1" in capsys.readouterr().err
