"""Every shipped recipe is parsed; those that can run here, run."""

import csv
import json
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from architectures import save_model
from forked_commands import run_forked
from model_families import FAMILIES, save_family
from model_folders import shallow
from ranks import on_ranks
from safetensors.torch import load_file
from sizes import FULL_SIZE

from lit_ft.cli import main
from lit_ft.strategies import ModelParallelStrategy

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
EXAMPLES = sorted((REPOSITORY / "recipes" / "examples").glob("*.yaml"))
"""Recipes to copy, for models and machines that are not here."""
FRAGMENTS = [path for path in sorted((REPOSITORY / "recipes").glob("*/*.yaml")) if path not in EXAMPLES]
"""Laid on top of a recipe."""
HUANHUAN = Path(os.environ.get("LIT_FT_TEST_DATA", ".")) / "huanhuan.json"
"""A real data set, used in place of generated rows where that folder has it."""
PAIRS = REPOSITORY / "recipes" / "data" / "preferences.jsonl"


@pytest.mark.parametrize("path", RECIPES + EXAMPLES, ids=lambda path: path.stem)
def test_parses_and_opens_with_its_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"^# .*(python -m lit_ft fit --config|make) ?", path.read_text(), re.MULTILINE)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(path), "--print_config"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    # What is printed parses to the same again.
    again = path.parent / f".printed-{path.stem}.yaml"
    again.write_text(printed)
    try:
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(again), "--print_config"])
    finally:
        again.unlink()
    assert capsys.readouterr().out == printed


NOT_HERE = {
    "deepspeed_zero3_nvme": "needs a disk, and libaio to compile for it",
    "deepspeed_zeropp": "its kernels are for CUDA",
}
"""Fragments that are parsed only."""


REFUSED = {"liger": "needs a CUDA device"}
"""Fragments that say so where there is no GPU."""
PACKAGE = {"wandb": "wandb", "mlflow": "mlflow", "litlogger": "litlogger", "comet": "comet_ml", "swanlab": "swanlab"}
"""Packages of the fragments for loggers; where one is installed, its fragment is parsed only: it wants an account."""
INSTEAD = {
    "compile": ["--model.compile", "eager", "--trainer.limit_val_batches", "0"],
    "eva": ["--model.peft.eva_config.tau", "0.9"],
}
"""The same without waiting for a C++ compiler (test_speed.py compares the numbers of compiled layers), and for
directions that hardly change any more."""


@pytest.fixture(scope="module")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two of the four layers of the quickstart's model; with ``LIT_FT_FULL_SIZE=1`` all."""
    model = REPOSITORY / "checkpoints" / "tiny-qwen2"
    return str(model) if FULL_SIZE else shallow(model, tmp_path_factory.mktemp("models") / "tiny-qwen2", layers=2)


ON_TOP = {
    "adalora": "optimizers/adafactor",
    "bottleneck": "optimizers/adamw_8bit",
    "dora": "optimizers/adamw_fused",
    "eva": "optimizers/lion",
    "pissa": "optimizers/muon",
    "qlora_int8": "optimizers/paged_adamw_8bit",
    "p_tuning": "optimizers/schedule_free",
    "prefix_tuning": "precision/bf16_mixed",
    "prompt_tuning": "precision/bf16_true",
    "ia3": "precision/float32",
    "llama_adapter": "precision/fp8",
    "lora_experts": "preference/ipo",
    "lora_plus": "preference/orpo",
    "qlora_loftq": "speed/activation_offload",
    "qlora_nf4": "speed/compile",
}
"""Fragments of a tuning method, and one each that runs on top of it; with ``LIT_FT_FULL_SIZE=1`` all run alone."""
if FULL_SIZE:
    ON_TOP = {}


def quickstart_with(fragments: Sequence[str], *options: str) -> Any:
    """Exit code of a run of two steps."""
    configs = [word for name in ("recipes/quickstart.yaml", *fragments) for word in ("--config", name)]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *configs, *options])
    return stop.value.code


def quickstart_of_rank(fragments: Sequence[str], *options: str) -> None:
    """A run of two steps by a process whose captured output ends with it."""
    with redirect_stderr(StringIO()) as printed:
        code = quickstart_with(fragments, *options, "--debug")
    assert code == 0, printed.getvalue()


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


ALONE = [path for path in FRAGMENTS if name_of(path) not in ON_TOP.values()]


@pytest.mark.parametrize("path", ALONE, ids=name_of)
def test_fragments_run_on_top_of_the_quickstart(
    path: Path,
    quickstart_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("LIT_FT_RUN_DIR", "")
    caplog.set_level("INFO", "lightning.pytorch")
    name, on_top = f"recipes/{name_of(path)}.yaml", ON_TOP.get(path.stem)
    fragments = [name] if on_top is None else [name, f"recipes/{on_top}.yaml"]
    for fragment in fragments:
        opening = f"python -m lit_ft fit --config recipes/quickstart.yaml --config {fragment}"
        assert opening in (REPOSITORY / fragment).read_text()
    if path.stem in NOT_HERE or (path.stem in PACKAGE and find_spec(PACKAGE[path.stem]) is not None):
        assert quickstart_with(fragments, "--print_config") == 0
        return
    options = ["--trainer.max_steps", "2", "--trainer.callbacks", "[]", "--trainer.limit_val_batches", "1"]
    options += ["--run_dir", str(tmp_path / "run"), "--model.pretrained", quickstart_model]
    if "micro_batch_size" not in path.read_text():
        options += ["--data.micro_batch_size", "4"]  # of 16: a quarter of the quickstart's work
    if path.parent.name == "strategies":  # which leave a process group and patches behind: in a process of its own
        # Parts of a model need as many ranks as the fragment's own command starts; the others run on one.
        command = re.search(r"--trainer.devices (\d+)$", path.read_text(), re.MULTILINE)
        ranks = int(command[1]) if command is not None and "ModelParallelStrategy" in path.read_text() else 1
        options += ["--trainer.devices", str(ranks)]
        on_ranks(ranks, quickstart_of_rank, fragments, *options)
    elif path.stem in PACKAGE:
        assert quickstart_with(fragments, *options) == 2
        assert re.search(rf"(?i)error: .*logger.*{PACKAGE[path.stem]}", capsys.readouterr().err.replace("-", "_"))
        return
    elif path.stem in REFUSED and not torch.cuda.is_available():
        assert quickstart_with(fragments, *options) == 2
        assert REFUSED[path.stem] in capsys.readouterr().err
        return
    else:
        if path.stem == "lora_experts":
            options += ["--model.pretrained", save_model("qwen3_moe", tmp_path / "model")]
        for fragment in fragments:
            options += INSTEAD.get(Path(fragment).stem, [])
        assert quickstart_with(fragments, *options) == 0
        assert ("routers are frozen; experts train by LoRA on" in caplog.text) == (path.stem == "lora_experts")
        assert "done: 2 optimizer steps" in caplog.text
    written = ("adapter/adapter_config.json", "merged/config.json")  # what trains all weights has no adapter
    assert any((tmp_path / "run" / name).is_file() for name in written)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "recipes" / "strategies").glob("*.yaml")), ids=lambda p: p.stem)
def test_strategies_place_and_change_nothing_else(path: Path) -> None:
    """Samples of a step, precision and the like stay the recipe's, so that losses do."""
    fragment = yaml.safe_load(path.read_text())
    assert fragment.keys() == {"trainer"}
    assert fragment["trainer"].keys() <= {"strategy", "devices"}


PARALLEL = ["tensor_parallel", "pipeline_parallel", "context_parallel", "parallel_3d"]


@pytest.mark.parametrize(("of_run", "fragment"), permutations(PARALLEL, 2), ids=" then ".join)
def test_a_parallel_strategy_over_a_run_of_another_one_has_its_own_sizes(of_run: str, fragment: str) -> None:
    """Arguments of one class are merged, so that a size that a fragment leaves out stays the run's."""
    first, own = (
        yaml.safe_load((REPOSITORY / "recipes" / "strategies" / f"{name}.yaml").read_text())["trainer"]["strategy"]
        for name in (of_run, fragment)
    )
    assert first["class_path"] == own["class_path"] == "lit_ft.strategies.ModelParallelStrategy"
    merged = ModelParallelStrategy(**{**first["init_args"], "expert_parallel_size": 2, **own["init_args"]}).placement
    wanted = ModelParallelStrategy(**own["init_args"]).placement
    assert (merged.requested, merged.expert_parallel_size) == (wanted.requested, wanted.expert_parallel_size)
    assert merged.requested.data == "auto"


def generate(*arguments: str) -> None:
    """``python recipes/data/generate.py ARGUMENTS``, forked."""
    done = run_forked(*arguments, module="recipes.data.generate", cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_generated_data_is_what_is_bundled(tmp_path: Path) -> None:
    generate("quickstart", "--out", str(tmp_path))
    for name in ("quickstart_train.json", "quickstart_val.json", "mixture_text.txt"):
        assert (tmp_path / name).read_bytes() == (REPOSITORY / "recipes" / "data" / name).read_bytes()
    generate("preferences", "--out", str(tmp_path))
    assert (tmp_path / PAIRS.name).read_bytes() == PAIRS.read_bytes()


def test_pretraining_runs(tmp_path: Path) -> None:
    """Steps of recipes/pretrain_tiny.yaml with a quarter of its tokens, on a small corpus of the same kind."""
    base = tmp_path / "base"
    generate("pretrain", "--out", str(base), "--documents", "500")
    done = run_forked(
        *("fit", "--config", "recipes/pretrain_tiny.yaml"),
        *("--model.pretrained", str(base), "--data.path", str(base / "corpus.jsonl"), "--data.packing", "512"),
        *("--run_dir", str(tmp_path / "run"), "--trainer.max_steps", "20", "--lr_scheduler.warmup", "5"),
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert losses[-1] < 5  # of 7.6 for random weights


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    """As a user runs it, but 60 of 450 steps; with ``LIT_FT_FULL_SIZE=1`` all."""
    run_dir = tmp_path / "run"
    options = [] if FULL_SIZE else ["--trainer.max_steps", "60"]
    command = ["fit", "--config", "recipes/quickstart.yaml", "--run_dir", str(run_dir), *options]
    done = run_forked(*command, cwd=REPOSITORY, timeout=500)
    assert done.returncode == 0, done.stderr
    scores = re.findall(r"val/exact_match (before|after) training: ([\d.]+)%", done.stderr)
    assert [when for when, _ in scores] == ["before", "after"]
    assert float(scores[0][1]) < 5
    assert float(scores[1][1]) > (80 if FULL_SIZE else 20)
    for name in ("adapter", "merged", "config.yaml"):
        assert (run_dir / name).exists()
    assert "next: python -m lit_ft predict" in done.stderr
    card = (run_dir / "merged" / "README.md").read_text(encoding="utf-8")
    assert f"| val/exact_match | {float(scores[1][1]) / 100:.4g} |" in card


def test_dpo_learns_which_held_out_answers_are_better(tmp_path: Path) -> None:
    configs = ["--config", "recipes/quickstart.yaml", "--config", "recipes/preference/dpo.yaml"]
    options = ["--trainer.callbacks", "[]", "--merge", "false", "--run_dir", str(tmp_path / "run")]
    done = run_forked("fit", *configs, *options, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "run" / "metrics.csv").open() as file:
        last = [row for row in csv.DictReader(file) if row["val/loss"]][-1]
    assert float(last["val/loss"]) < 0.65  # log 2 before the first step
    assert float(last["val/reward_accuracy"]) > 0.5  # of 12 pairs


def test_grpo_after_supervised_training(tmp_path: Path) -> None:
    quick = ("fit", "--config", "recipes/quickstart.yaml", "--merge", "false", "--trainer.callbacks", "[]")
    first = ("--trainer.max_steps", "60", "--trainer.limit_val_batches", "0", "--run_dir", str(tmp_path / "SFT"))
    done = run_forked(*quick, *first, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    adapter = ("--model.peft", "null", "--model.adapter", str(tmp_path / "SFT" / "adapter"))
    options = ("--trainer.max_steps", "3", "--trainer.val_check_interval", "3", "--trainer.limit_val_batches", "1")
    run = tmp_path / "run"
    policy = ("--config", "recipes/policy/grpo.yaml", *adapter, *options, "--run_dir", str(run))
    done = run_forked(*quick, *policy, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "on 8 answers of its own to each prompt, by GRPO(scale_rewards=True) of ExactAnswer()" in done.stderr
    assert re.search(r"step 3 of 3: val/loss [\d.]+, val/reward 0\.[1-9]", done.stderr)  # not 0, as of the base
    assert re.search(r"a step takes .*, generation \d\d\.\d%", done.stderr)
    assert len((run / "sampled_answers.jsonl").read_text("utf-8").splitlines()) == 8
    assert "Trained on 8 answers of its own" in (run / "adapter" / "README.md").read_text("utf-8")


def test_a_smaller_model_learns_from_the_embedded_one(tmp_path: Path) -> None:
    quick = ("fit", "--config", "recipes/quickstart.yaml", "--trainer.callbacks", "[]", "--merge", "false")
    taught = ("--model.teacher", "checkpoints/tiny-qwen2", "--trainer.val_check_interval", "3", "--trainer.max_steps")
    two = "{num_hidden_layers: 2, layer_types: [full_attention, full_attention]}"
    student = ("--model.peft", "null", "--model.config_overrides", two, "--run_dir", str(tmp_path / "kd"))
    done = run_forked(*quick, "--config", "recipes/distillation/kd.yaml", *taught, "3", *student, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    objective = r"on the answers of the data by ForwardKL\(temperature=2\) from checkpoints/tiny-qwen2, 0.5 of the loss"
    assert re.search(f"training all weights of .* {objective}", done.stderr)
    assert re.search(r"step 3 of 3: val/loss [\d.]+, .*val/divergence [\d.]+", done.stderr)
    run = ("--run_dir", str(tmp_path / "run"), "--trainer.limit_val_batches", "1", "--optimizer.lr", "3e-3")
    done = run_forked(*quick, "--config", "recipes/distillation/on_policy.yaml", *taught, "6", *run, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    objective = "1 answer of its own to each prompt by ReverseKL(temperature=1) from checkpoints/tiny-qwen2"
    assert f"Trained on {objective}." in (tmp_path / "run" / "adapter" / "README.md").read_text("utf-8")
    first = (tmp_path / "run" / "sampled_answers.jsonl").read_text("utf-8").splitlines()[0]
    assert json.loads(first)["step"] == 1


@pytest.mark.parametrize("recipe", ["qwen", "full", "qwen_dpo", "qwen_grpo"])
def test_qwen_recipes_run_on_another_model(tmp_path: Path, model_folder: str, write_rows: Any, recipe: str) -> None:
    data = str(HUANHUAN) if HUANHUAN.is_file() else write_rows()
    if recipe == "qwen_dpo":
        data = str(PAIRS)
    elif recipe == "qwen_grpo":
        data = write_rows([{"instruction": f"{i} + {i}?", "output": f"#### {2 * i}"} for i in range(100)])
    done = run_forked(
        *("fit", "--config", f"recipes/{recipe}.yaml"),
        *("--model.pretrained", model_folder, "--data.path", data, "--data.system", "你是甄嬛。"),
        *("--run_dir", str(tmp_path / "run"), "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "6"),
        *("--trainer.accelerator", "cpu", "--data.max_length", "384"),  # the model has 512 positions
        *(("--model.max_new_tokens", "4") if recipe == "qwen_grpo" else ()),
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    name = "last.ckpt" if recipe == "qwen_grpo" else "epoch=0-step=*.ckpt"
    assert list((tmp_path / "run" / "checkpoints").glob(name))


THINKING = "{enable_thinking: true}"


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, []) for name in FAMILIES), ("qwen3", ["--data.template_options", THINKING])],
    ids=[*FAMILIES, "qwen3 thinking"],
)
def test_recipes_of_families_run_on_a_tiny_model_of_theirs(
    name: str, options: list[str], tmp_path: Path, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the family's own template: two steps, and every module that the recipe names gets an adapter."""
    monkeypatch.setenv("LIT_FT_RUN_DIR", "")
    recipe = REPOSITORY / "recipes" / f"{name}.yaml"
    small = ["--trainer.max_steps", "2", "--trainer.accumulate_grad_batches", "2", "--trainer.accelerator", "cpu"]
    small += ["--trainer.log_every_n_steps", "1", "--run_dir", str(tmp_path / "run")]
    small += ["--data.packing", "384"]
    folders = ["--model.pretrained", save_family(name, tmp_path / "model"), "--data.path", write_rows(count=9)]
    assert fit_example(recipe, *folders, *small, "--data.max_length", "384", *options) == 0
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert [0 < float(row["train/loss"]) < 8 for row in csv.DictReader(file) if row["train/loss"]] == [True, True]
    trained = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors").keys()
    targets = yaml.safe_load(recipe.read_text())["model"]["peft"]["init_args"]["target_modules"]
    assert [target for target in targets if not any(f".{target}.lora_A" in key for key in trained)] == []


RANKS = {"long_context": 2}
"""Ranks of examples whose strategy needs several; the others run on one."""
SMALL = {
    "long_context": ["--trainer.strategy.context_parallel_size", "2"],
    "two_nodes": ["--trainer.num_nodes", "1"],
}
TOOL_ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"is cup {number} red"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "cup"}}}],
            },
            {"role": "tool", "name": "look", "content": "red"},
            {"role": "assistant", "content": "the cup is red"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "look",
                    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
                },
            }
        ],
    }
    for number in range(20)
]
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls | default([]) %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fit_example(path: Path, *options: str) -> Any:
    """Exit code of a run of an example's recipe."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(path), *options])
    return stop.value.code


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_small(
    path: Path, tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of each example on a small model, with its own tuning method, optimizer, precision and strategy."""
    monkeypatch.setenv("LIT_FT_RUN_DIR", "")
    command = re.search(r"^# .*python -m lit_ft fit --config (\S+) --data.path (\S+)", path.read_text(), re.MULTILINE)
    assert command is not None
    assert command[1] == str(path.relative_to(REPOSITORY))
    texts = [{"text": f"{number} {'the red cup is over the lamp ' * 9}"} for number in range(20)]
    rows = {"tools.jsonl": TOOL_ROWS, "texts.jsonl": texts}.get(command[2])
    template = tmp_path / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    chat = ["--data.chat_template", str(template)] if rows is TOOL_ROWS else []
    ranks = RANKS.get(path.stem, 1)
    done = on_ranks(
        *(ranks, fit_example, path, "--model.pretrained", model_folder, "--data.path", write_rows(rows), *chat),
        *("--data.max_length", "384", "--data.packing", "512", "--data.val_fraction", "0.2"),
        *("--trainer.accelerator", "cpu", "--trainer.devices", str(ranks), *SMALL.get(path.stem, [])),
        *("--trainer.max_steps", "2", "--trainer.accumulate_grad_batches", "1", "--trainer.log_every_n_steps", "1"),
        *("--trainer.callbacks", "[]", "--run_dir", str(tmp_path / "run")),
    )
    assert done == [0] * ranks
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert [float(row["train/loss"]) > 0 for row in csv.DictReader(file) if row["train/loss"]] == [True, True]
    assert any((tmp_path / "run" / name).is_file() for name in ("adapter/adapter_config.json", "merged/config.json"))
