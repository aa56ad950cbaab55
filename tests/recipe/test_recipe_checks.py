"""Recipes with values that no type catches: one line and exit code 2, before any weights load."""

import json
import logging
import warnings
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from command_line import recipe, run
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lit_callbacks.export import merging
from torch import nn

from lit_ft import cli
from lit_ft.cli import main
from lit_ft.data.text_data import TextDataModule
from lit_ft.recipe.trainer_checks import warn_of_no_validation, warn_of_options_without_effect

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[str, str]] = {
    "null where a value is needed": (
        "trainer: {max_steps: null}",
        "trainer.max_steps=null is not allowed",
    ),
    "a null of the model": ("model: {dtype: null}", "model.dtype=null is not allowed; leave it out or give a value"),
    "no mapping": ("trainer: [1]", "trainer=[1] is no mapping"),
    "a number": ("trainer: 1.0e+308", "trainer=1e+308 is no mapping"),
    "seed": ("seed_everything: 42000000000", "seed_everything=42000000000 must be 0 to 4294967295"),
    "learning rate": (
        "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: -1}}",
        "optimizer: ValueError: Invalid learning rate: -1",
    ),
    "an argument that is looked at in a step": (
        "optimizer: {class_path: bitsandbytes.optim.AdamW8bit, init_args: {min_8bit_size: x}}",
        "optimizer: TypeError: ",
    ),
    "a step that goes to infinity": (
        "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1.0e-3, weight_decay: .inf}}",
        "optimizer: ValueError: a step makes weights infinite",
    ),
    "sparse gradients": ("optimizer: {class_path: torch.optim.SparseAdam}", "optimizer: RuntimeError: SparseAdam does"),
    "a schedule": (
        "lr_scheduler: {class_path: torch.optim.lr_scheduler.OneCycleLR, init_args: {max_lr: 1}}\n"
        "optimizer: {class_path: torch.optim.SGD}",
        "lr_scheduler: ValueError: You must define either total_steps",
    ),
    "warm-up": (
        "lr_scheduler: {class_path: lit_ft.schedules.CosineWithWarmup, init_args: {warmup: .nan}}\n"
        "optimizer: {class_path: torch.optim.SGD}",
        "warmup=nan must be a share below 1",
    ),
    "a null character": ('data: {cache_dir: "a\\0b"}', "data.init_args.cache_dir holds a null character"),
    "a path that is too long": (f"data: {{path: {'x' * 3000}.json}}", "too long for a path; name a shorter one"),
    "a run_dir that is too long": (f"run_dir: {'x' * 3000}", "too long for a path"),
    "a ckpt_path that is too long": (f"ckpt_path: {'x' * 3000}", "too long for a path"),
    "a model that is too long": (f"model: {{pretrained: {'x/' * 2000}}}", "model.pretrained="),
    "a strategy": ("trainer: {strategy: no-such}", "trainer.strategy=no-such is no strategy of Lightning"),
    "a profiler": ("trainer: {profiler: no}", "trainer"),
    "devices": ("trainer: {devices: '~'}", "trainer: "),
    "more ranks than any machine has cores": (
        "trainer: {devices: 100000}",
        "trainer.devices=100000 would start 100,000 processes on this machine's ",
    ),
    "all layers in a list": (
        "model: {peft: {init_args: {target_modules: [all-linear]}}}",
        "model.peft: target_modules=['all-linear'] is a list; write target_modules: all-linear",
    ),
    "modules as one text": (
        "model: {peft: {init_args: {target_modules: 'q_proj,v_proj'}}}",
        "target_modules='q_proj,v_proj' is one text, which PEFT reads as a regular expression for full names, and it "
        "matches none; write a list: [q_proj, v_proj]",
    ),
    "no device": ("trainer: {devices: 0}", "using cpu accelerator; give a number of devices from 1 on, or auto"),
    "a callback for the checkpoints that are off": (
        "trainer: {enable_checkpointing: false, callbacks: [lightning.pytorch.callbacks.ModelCheckpoint]}",
        "in callbacks list; leave trainer.enable_checkpointing out, or take ModelCheckpoint out of trainer.callbacks",
    ),
    "Lightning's DeepSpeed without a GPU": (
        "trainer: {strategy: deepspeed_stage_2, devices: 2}",
        "for CUDA GPUs alone, and there is none; take lit_ft.strategies.DeepSpeedStrategy: --config recipes",
    ),
    "Lightning's FSDP without a GPU": (
        "trainer: {strategy: fsdp, devices: 2}",
        "for CUDA GPUs alone, and there is none; take lit_ft.strategies.FSDPStrategy: --config recipes/strategies/fsdp",
    ),
    "processes that take pickled objects": (
        "trainer: {strategy: ddp_spawn, devices: 2}",
        "trainer.strategy=ddp_spawn pickles model and data for each process, which cannot be pickled; take ddp",
    ),
    "a strategy's class as a text": (
        "trainer: {strategy: lit_ft.strategies.FSDPStrategy}",
        "a class is written --trainer.strategy.class_path lit_ft.strategies.FSDPStrategy, in a recipe strategy:",
    ),
    "another class as a strategy": (
        "trainer: {strategy: torch.nn.Linear}",
        "a class is written --trainer.strategy.class_path lit_ft.strategies.FSDPStrategy, in a recipe strategy:",
    ),
    "a null of the model's base class": (
        "model: {class_path: lit_ft.PreferenceLM, init_args: {max_new_tokens: null}}",
        "model.max_new_tokens=null is not allowed; leave it out or give a value (the default is 256)",
    ),
    "DeepSpeed's configuration as a strategy": (
        "trainer: {strategy: ds_z2.json}",
        "is a file; DeepSpeed's configuration is an option of its class: --trainer.strategy lit_ft.strategies.DeepSp",
    ),
    "a strategy's class that is none, as a text": (
        "trainer: {strategy: '{class_path: lit_ft.FSDPStrategy}'}",
        "is no class of a strategy with options of its own; write --trainer.strategy.class_path CLASS",
    ),
    "an empty path": ("data: {path: ''}", "data.path='' names nothing; give a file, a folder, a glob, or a data set"),
    "a class of another kind": ("model: {peft: {class_path: torch.nn.Linear}}", "model.peft: "),
    "a class with a list for a name": (
        "trainer: {plugins: [{class_path: [a]}]}",
        "trainer.plugins: class_path must be a",
    ),
    "a misspelt init_args": (
        "trainer: {plugins: [{class_path: lit_ft.precision.Float8Precision, init_argss: {scaling: tensorwise}}]}",
        "more.yaml:1: 'init_argss' stands beside class_path; did you mean init_args?",
    ),
    "what a tuning method refuses": (
        "model: {peft: {class_path: peft.PromptTuningConfig, init_args: {num_virtual_tokens: null}}}",
        "model.peft: num_virtual_tokens is missing; give the length of the prompt, e.g. 20",
    ),
    "a name that is none": ("model: {tokenizer: '{}'}", "no hub id is spelled like that"),
    "a way to clip without a value": (
        "trainer: {gradient_clip_algorithm: value}",
        "trainer.gradient_clip_algorithm=value clips nothing without trainer.gradient_clip_val",
    ),
    "a negative clip value": ("trainer: {gradient_clip_val: -1}", "trainer.gradient_clip_val=-1 must be 0 or more"),
    "no micro-batch": ("trainer: {accumulate_grad_batches: 0}", "accumulate_grad_batches=0 must be 1 or more"),
    "no node": ("trainer: {num_nodes: 0}", "trainer.num_nodes=0 must be 1 or more"),
    "logging between no steps": ("trainer: {log_every_n_steps: -1}", "trainer.log_every_n_steps=-1 must be 0 or more"),
    "fewer batches than none": ("trainer: {num_sanity_val_steps: -2}", "num_sanity_val_steps=-2 must be -1 or more"),
    "no rank": ("model: {peft: {init_args: {r: 0}}}", "model.peft: r=0 must be 1 or more, e.g. 8"),
    "negative dropout": (
        "model: {peft: {init_args: {lora_dropout: -1}}}",
        "lora_dropout=-1.0 must be at least 0 and bel",
    ),
    "a file for a model": (
        "model: {pretrained: README.md}",
        "model.pretrained='README.md' is a file; name a folder",
    ),
    "a negative bin": ("data: {packing: -5}", "data.packing=-5 must be the token budget of a packed sequence"),
    "no epoch between": ("trainer: {check_val_every_n_epoch: 0}", "check_val_every_n_epoch=0 must be 1 or more"),
    "a minimum above the maximum": (
        "trainer: {min_epochs: 3, max_epochs: 2}",
        "trainer.min_epochs=3 is more than trainer.max_epochs=2, where training ends",
    ),
    "nothing saved": ("trainer: {barebones: true}", "trainer.barebones=true is for measuring Lightning's own time"),
    "saves in the background": (
        "trainer: {plugins: [lightning.pytorch.plugins.io.AsyncCheckpointIO]}",
        "AsyncCheckpointIO removes the earlier checkpoint before the later one is written",
    ),
    "a top-level key in a section": (
        "trainer: {lr_scheduler: cosine}",
        "'lr_scheduler' is no option of a section; write it at the left edge of the recipe",
    ),
    "a dash in a key": ("trainer: {max-steps: 2}", "'max-steps'; it belongs to trainer: trainer.max_steps"),
    "a switch for a text": ("data: {val_path: no}", "data.val_path: 'False' is no text; put it in quotes (YAML reads"),
    "a switch for a class": (
        "model: {peft: true}",
        "model.peft: true names no class; write e.g. peft.LoraConfig, or null for none",
    ),
    "a class without its name": (
        "lr_scheduler: {class_path: null, warmup: 8}",
        "'warmup' stands beside class_path",
    ),
    "validation after no step": (
        "trainer: {val_check_interval: 0}",
        "trainer.val_check_interval=0 must be above 0; for no validation set trainer.limit_val_batches=0",
    ),
    "a norm that clips nothing": (
        "trainer: {gradient_clip_val: .inf}",
        "trainer.gradient_clip_val=inf clips nothing; leave it out",
    ),
    "a registry without its callback": (
        "trainer: {model_registry: mine}",
        "trainer.model_registry=mine is for Lightning's default ModelCheckpoint and",
    ),
    "another folder": (
        "trainer: {default_root_dir: out}",
        "trainer.default_root_dir=out: a run's files are in run_dir; write run_dir: out",
    ),
    "a callback twice": (
        "trainer: {callbacks: [lit_callbacks.SpikeGuard, {class_path: lit_callbacks.SpikeGuard}]}",
        "trainer.callbacks lists lit_callbacks.SpikeGuard twice with the same options; leave one out",
    ),
    "an accelerator whose package is missing": ("trainer: {accelerator: tpu}", "trainer: Requirement 'torch_xla"),
    "a run folder without a name": ("run_dir: ''", "run_dir='' names nothing; leave it out, or give a path"),
    "a checkpoint without a name": ("ckpt_path: ''", "ckpt_path='' names nothing; leave it out, or give a path"),
    "a metric of a schedule": (
        "lr_scheduler: {class_path: lightning.pytorch.cli.ReduceLROnPlateau, init_args: {monitor: val_loss}}\n"
        "optimizer: {class_path: torch.optim.SGD}\ndata: {val_fraction: 0.2}",
        "lr_scheduler: ReduceLROnPlateau reads 'val_loss', which is not logged; did you mean 'val/loss'?",
    ),
    "a prompt that is a file": (
        "data: {system: README.md}",
        "data.system='README.md' names a file, and its name would be the prompt; give the text: --data.system ",
    ),
    "a model without a name": ("model: {pretrained: ''}", "model.pretrained='' names nothing; give a model folder or"),
    "a tokenizer that is not there": ("model: {tokenizer: /none}", "model.tokenizer='/none' does not exist; name a"),
    "attention": (
        "model: {attn_implementation: spda}",
        "model.attn_implementation='spda' is none of auto, eager, ",
    ),
    "a cause in a second line": (
        "model: {config_overrides: {num_hidden_layers: 7}}",
        "(7) must be equal to the number of `layer_types`",
    ),
    "no step": ("trainer: {max_steps: 0}", "trainer.max_steps=0 would train nothing; give more, or use the command"),
    "no epoch": ("trainer: {max_epochs: 0}", "trainer.max_epochs=0 would train nothing"),
    "no batch": ("trainer: {limit_train_batches: 0}", "trainer.limit_train_batches=0 would train nothing"),
    "no learning rate": (
        "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0}}",
        "optimizer: ValueError: a learning rate of 0 trains nothing",
    ),
    "no scale": ("model: {peft: {init_args: {lora_alpha: 0}}}", "model.peft: lora_alpha=0 must be above 0: the adap"),
    "negative noise": ("model: {neftune_alpha: -5}", "model.neftune_alpha=-5.0 must be above 0 and finite, e.g. 5"),
    "a duration": ("trainer: {max_time: 1 hour}", "Expected a string in the format DD:HH:MM:SS"),
    "no time": ("trainer: {max_time: '00:00:00:00'}", "trainer.max_time=00:00:00:00 would train nothing; give days"),
    "a misspelt metric": (
        "trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {monitor: val_loss}}]}\n"
        "data: {val_fraction: 0.2}",
        "ModelCheckpoint monitors 'val_loss', which is not logged; did you mean 'val/loss'? There are train/loss, ",
    ),
    "a metric without data": (
        "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/loss}}]}",
        "EarlyStopping monitors 'val/loss', and there is no validation; set data.val_path or data.val_fraction",
    ),
    "a run that ends before its first validation": (
        "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/loss}}]}\n"
        "data: {val_fraction: 0.2}",
        "trainer.max_steps=1 ends the run after 1 micro-batches, before its first validation after 9, so EarlyStopping",
    ),
    "a learning rate from elsewhere": (
        "trainer: {callbacks: [{class_path: LearningRateFinder}]}",
        "LearningRateFinder would train with another learning rate than the recipe's, which a schedule or a resumed",
    ),
    "a checkpoint from elsewhere": (
        "trainer: {callbacks: [{class_path: OnExceptionCheckpoint, init_args: {dirpath: .}}]}",
        "OnExceptionCheckpoint would start a new run from the checkpoint of another one that failed; take",
    ),
    "a callback that cannot resume": (
        "trainer: {callbacks: [{class_path: SpikeDetection}]}",
        "SpikeDetection makes checkpoints that it cannot read again (Lightning 2.6), and lists batches that nothing",
    ),
    "an average that is none": (
        "trainer: {callbacks: [{class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.1}}]}",
        "StochasticWeightAveraging copies a model that is not there yet, and would average nothing; take",
    ),
    "the best of an average": (
        "trainer: {callbacks: [{class_path: EMAWeightAveraging}, {class_path: lit_callbacks.AdapterMerger, "
        "init_args: {adapter_dir: a, on_best: true}}]}",
        "AdapterMerger's on_best writes the weights of that step, and what is best is their average; leave on_best out",
    ),
    "an average of an average": (
        "trainer: {callbacks: [{class_path: EMAWeightAveraging}]}\n"
        "optimizer: {class_path: schedulefree.AdamWScheduleFree, init_args: {lr: 0.001}}",
        "EMAWeightAveraging would replace the average that AdamWScheduleFree makes, which is what it trains; leave one",
    ),
    "an optimizer that cannot resume": (
        "optimizer: {class_path: pytorch_optimizer.ScalableShampoo, init_args: {lr: 0.001}}",
        "ScalableShampoo: state holds objects of pytorch_optimizer.optimizer.utils.graft.SGDGraft, ",
    ),
    "a folder for a file name": (
        "trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {filename: '{step}-{val/loss:.2f}'}}]}",
        "write '{step}-loss={val/loss:.2f}' with auto_insert_metric_name: false",
    ),
    "a section without options": ("data:\nmodel:", "data is named without options; give them"),
    "a key twice": (
        "trainer: {max_steps: 3}\ndata: {path: a}\ntrainer: {max_epochs: 1}",
        ":3: 'trainer' stands in line 1",
    ),
    "nothing": ("", "more.yaml: is empty; a recipe names at least a model and data"),
    "escapes": ('data: {path: "./\\e]0;no.json"}', r"'./\x1b]0;no.json' does not exist"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_line_before_any_weights(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_ft.model.loading.load_base", lambda *_: pytest.fail("weights were loaded"))
    text, message = CASES[name]
    path = tmp_path / "more.yaml"
    path.write_text(text)
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    arguments += [] if "run_dir" in text else ["--run_dir", str(tmp_path / "run")]
    lines = run(capsys, *arguments, "--config", str(path), code=2)
    last = lines.strip().splitlines()[-1]
    assert last.startswith("lit_ft: error: ")
    assert message in last
    assert "Traceback" not in lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, None),
        ({"limit_val_batches": 0, "num_sanity_val_steps": 0}, None),
        (
            {"val_check_interval": 1, "check_val_every_n_epoch": 2},
            r"val_check_interval=1, trainer.check_val_every_n_epoch=2 without an effect: there is no validation data",
        ),
        ({"limit_val_batches": 5}, "trainer.limit_val_batches=5 without an effect: there is no validation data"),
        ({"limit_val_batches": 0, "val_check_interval": 0.5}, "trainer.limit_val_batches=0 leaves no validation"),
    ],
)
def test_options_of_validations_that_there_are_not(options: dict[str, Any], message: str | None) -> None:
    names = ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches", "num_sanity_val_steps")
    defaults = {name: signature(Trainer).parameters[name].default for name in names}
    with pytest.warns(UserWarning, match=message) if message else nullcontext(), warnings.catch_warnings():
        if message is None:
            warnings.simplefilter("error")
        warn_of_no_validation(Namespace(**{**defaults, **options}))


@pytest.mark.parametrize("option", ["sync_batchnorm", "use_distributed_sampler"])
def test_options_of_the_trainer_without_an_effect(write_rows: Any, option: str) -> None:
    options = Namespace(sync_batchnorm=False, use_distributed_sampler=True)
    data = TextDataModule(write_rows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_options_without_effect(options, nn.Linear(2, 2), data)
        warn_of_options_without_effect(
            Namespace(sync_batchnorm=True, use_distributed_sampler=True), nn.BatchNorm1d(2), data
        )
        warn_of_options_without_effect(
            Namespace(sync_batchnorm=False, use_distributed_sampler=False), nn.Linear(2, 2), None
        )
    options[option] = not options[option]
    with pytest.warns(UserWarning, match=f"trainer.{option}=(true|false) has no effect: "):
        warn_of_options_without_effect(options, nn.Linear(2, 2), data)


def test_a_recipe_that_is_no_text(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"data:\n  path: \xff\xfe\n")
    lines = run(capsys, "fit", "--config", str(path), code=2)
    assert f"lit_ft: error: --config {path}: is not UTF-8 (byte 14); save the recipe as UTF-8 text" in lines


def test_messages_are_short(capsys: Any, tmp_path: Path, model_folder: str) -> None:
    sources = [{"path": "a.json", "nam": i, "text": "x" * 500} for i in range(50)]
    assert len(run(capsys, "fit", f"--trainer.{'x' * 3000}", "1", code=2)) < 300
    lines = run(capsys, "fit", "--model.pretrained", model_folder, "--data.sources", json.dumps(sources), code=2)
    assert "unknown option 'nam'" in lines
    assert max(map(len, lines.splitlines())) < 700


def test_log_lines_and_warnings_cannot_steer_the_terminal(capsys: Any) -> None:
    run(capsys, "fti", code=2)
    with pytest.raises(SystemExit):
        main(["report", "nowhere"])  # a command that runs sets it up
    logging.getLogger("some.library").warning("name %s", "\x1b]0;title\x07\nnext")
    warnings.warn("a\x1b[2J", stacklevel=1)
    record = logging.getLogRecordFactory()("a", 20, "b", 1, "%s", ("\x9b31m",), None)
    assert record.getMessage() == "\\x9b31m"
    assert warnings.formatwarning("a\x1b[2J", UserWarning, "b.py", 1).startswith("b.py:1: UserWarning: a\\x1b[2J")
    for module in (cli, merging):  # ours: what is said, not where in our code
        assert warnings.formatwarning("a\x1b[2J", UserWarning, str(module.__file__), 1) == (
            "lit_ft: warning: a\\x1b[2J\n"
        )
