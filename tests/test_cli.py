"""The command line as a user meets it."""

import csv
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import losses, recipe, run
from lit_callbacks.lifecycle.graceful_stop import StopRequested
from peft.utils.save_and_load import _validate_lora_adapter_state_dict
from shared_fixtures import make_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_ft import __version__, cli
from lit_ft.cli import COMMANDS, main
from lit_ft.commands.train import DESCRIPTIONS

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]


def test_biases_of_lora_are_not_taken_for_shards_and_shards_are() -> None:
    bias, shard = {"q.lora_B.bias": torch.zeros(4)}, {"q.lora_A.weight": torch.zeros(0)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for message in cli._CHATTER:
            warnings.filterwarnings("ignore", message=message)
        for number in (1, 3, 5):
            _validate_lora_adapter_state_dict({f"{n}.{name}": one for n in range(number) for name, one in bias.items()})
        assert not said
        _validate_lora_adapter_state_dict(bias | shard)
    assert "were not gathered" in str(said[0].message)


def test_help_is_quick_and_lists_every_command() -> None:
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "lit_ft", "--help"], capture_output=True, text=True, check=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.5
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    slow = {"torch", "lightning", "transformers", "peft", "jsonargparse"}
    check = f"import lit_ft.cli, sys; assert not {slow!r} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_log_line_of_a_library_that_is_being_imported_imports_nothing() -> None:
    code = (
        "import logging, sys; from lit_ft import cli; cli._escape_log_lines(); logging.warning('no cache: 红\\n');"
        "assert not {'torch', 'lightning', 'lit_callbacks'} & set(sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr
    assert said == "WARNING:root:no cache: 红\n\n"


def test_a_process_with_closed_streams_gets_others() -> None:
    code = (
        "import os, sys; from lit_ft import cli; cli._open_closed_streams(); print(1, flush=True);"
        "sys.stdin.read(); print(2, file=sys.stderr);"
        "assert all(os.path.sameopenfile(n, os.open(os.devnull, os.O_RDWR)) for n in range(3));"
        "assert all(os.get_inheritable(n) for n in range(3))"
    )
    subprocess.run(f"{shlex.join([sys.executable, '-c', code])} <&- >&- 2>&-", shell=True, check=True)


def test_fit_help_explains_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["fit", "--help"], ["--run_dir", "--merge", "lit_ft.schedules.CosineWithWarmup", "--ckpt_path"]),
        (["fit", "--help"], ["--model.neftune_alpha", "recompute activations", "--trainer.max_epochs"]),
        (["fit", "--help"], ["--data.packing", "token budget of a packed sequence"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        for word in words:
            assert word in text


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_begins_with_the_command_and_what_it_does(capsys: Any, command: str) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--help"])
    usage, sentence = capsys.readouterr().out.split("\n\n")[:2]
    assert usage.startswith(f"usage: python -m lit_ft {command} [")
    assert " ".join(sentence.split()) == DESCRIPTIONS[command]


def test_a_run_leaves_what_the_readme_says(
    capsys: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    run_dir = tmp_path / "run"
    arguments = recipe(tmp_path, model_folder, write_rows(), max_epochs=1, accumulate_grad_batches=2)
    options = ["--run_dir", str(run_dir), "--merge", "--data.val_fraction", "0.2"]
    caplog.set_level("INFO", "lightning.pytorch")
    run(capsys, *arguments, *options)
    assert caplog.messages[:2] == ["Seed set to 3", "CPU: 1 thread"]
    assert "training LORA of" in caplog.text
    assert "optimizer steps; an epoch is 18 samples" in caplog.text
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert b"^train/loss/.*$" in events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {"config.yaml", "metrics.csv", "tensorboard", "checkpoints", "adapter", "merged"}
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {key for row in rows for key, value in row.items() if value}
    assert logged >= {
        "train/loss", "train/perplexity", "train/token_accuracy", "train/grad_norm", "train/learning_rate",
        "val/loss", "val/perplexity", "val/token_accuracy", "throughput/tokens_per_second",
    }  # fmt: skip
    assert list((run_dir / "tensorboard").glob("events.out.tfevents*"))

    merged = AutoModelForCausalLM.from_pretrained(run_dir / "merged")
    assert AutoTokenizer.from_pretrained(run_dir / "merged").chat_template
    assert (run_dir / "merged" / "generation_config.json").is_file()
    assert merged.config._attn_implementation == "sdpa"
    prompt = torch.tensor([[1, 40, 50]])
    assert merged.generate(prompt, max_new_tokens=3, do_sample=False).shape == (1, 6)

    exported = tmp_path / "exported"
    run(capsys, "export", "--run", str(run_dir), "--merge", "--out", str(exported))
    again = AutoModelForCausalLM.from_pretrained(exported)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), merged.parameters(), strict=True))
    run(capsys, "export", "--run", str(run_dir), "--merge", "--dtype", "bfloat16", "--out", str(exported))
    assert AutoModelForCausalLM.from_pretrained(exported).dtype == torch.bfloat16

    assert "holds a run already" in run(capsys, *arguments, *options, code=2)


def test_a_checkpoint_is_as_large_as_what_trains(
    capsys: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=2)
    arguments += ["--model.peft.target_modules", "all-linear", "--model.peft.r", "16"]
    arguments += ["--optimizer", "torch.optim.AdamW"]
    run(capsys, *arguments, "--run_dir", str(tmp_path / "run"))
    file = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    states = [value for state in checkpoint["optimizer_states"][0]["state"].values() for value in state.values()]
    wanted = sum(t.numel() * t.element_size() for t in (*checkpoint["state_dict"].values(), *states))
    assert wanted > 250_000
    assert file.stat().st_size < 1.2 * wanted  # the base would be as much again
    assert f"checkpoint: {file}, {file.stat().st_size / 2**20:.1f} MiB; the weights that train are" in caplog.text


def test_the_saved_config_runs_again(
    capsys: Any,
    tmp_path: Path,
    model_folder: str,
    write_rows: Any,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(capsys, *recipe(tmp_path, model_folder, write_rows(), max_steps=2), "--run_dir", str(first))
    run(capsys, "fit", "--config", str(first / "config.yaml"), "--run_dir", str(second))
    one, two = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (first, second))
    assert one.pop("run_dir") != two.pop("run_dir")
    assert one == two
    losses = [[row["train/loss"] for row in csv.DictReader((f / "metrics.csv").open())] for f in (first, second)]
    assert losses[0] == losses[1]
    monkeypatch.chdir(tmp_path)
    again = ["--config", "first/config.yaml", "--run_dir", "first", "--data.val_path", one["data"]["init_args"]["path"]]
    run(capsys, "validate", *again, "--ckpt_path", "last")
    assert not [warning for warning in recwarn if "dirpath has changed" in str(warning.message)]


def test_a_resumption_keeps_the_recipe_before_and_says_what_ends_the_run(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = tmp_path / "run"
    run(capsys, *recipe(tmp_path, model_folder, write_rows(), max_steps=2), "--run_dir", str(folder))
    config = folder / "config.yaml"
    before = config.read_bytes()
    again = ["fit", "--config", str(config), "--ckpt_path", "last"]
    run(capsys, *again)
    assert "already (trainer.max_steps=2): nothing is left to train; to go on, raise it" in caplog.text
    assert (config.read_bytes(), list(folder.glob("config-*"))) == (before, [])
    run(capsys, *again, "--trainer.max_steps", "3")
    assert (folder / "config-until-step-2.yaml").read_bytes() == before
    assert yaml.safe_load(config.read_text())["trainer"]["max_steps"] == 3
    assert f"{config} has the options of this resumption, config-until-step-2.yaml those before" in caplog.text
    run(capsys, *again, "--trainer.max_epochs", "1", "--trainer.max_steps", "100")
    run(capsys, *again, "--trainer.max_epochs", "1", "--trainer.max_steps", "200")
    assert "(trainer.max_epochs=1): nothing is left to train; to go on, set it to -1, and the run" in caplog.text


@pytest.mark.parametrize(("value", "wanted"), [("off", None), ("false", None), ("null", None), ("512", 512)])
def test_packing_may_be_off(tmp_path: Path, value: str, wanted: int | None) -> None:
    """As an option, and in YAML, where ``off`` is read as false."""
    from jsonargparse import ArgumentParser

    from lit_ft import TextDataModule

    parser = ArgumentParser()
    parser.add_class_arguments(TextDataModule, "data")
    parser.add_argument("--config", action="config")
    recipe_file = tmp_path / "packing.yaml"
    recipe_file.write_text(f"data: {{packing: {value}}}\n")
    for arguments in (["--data.packing", value], ["--config", str(recipe_file)]):
        assert parser.instantiate_classes(parser.parse_args(arguments)).data.packing == wanted


def test_validate_test_and_predict(
    capsys: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    run_dir = tmp_path / "run"
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=2)[1:]
    arguments += ["--data.val_path", write_rows(count=5, name="val.json"), "--run_dir", str(run_dir)]
    run(capsys, "fit", *arguments)
    run(capsys, "validate", *arguments, "--ckpt_path", "last")
    run(capsys, "test", *arguments, "--ckpt_path", "last")
    with caplog.at_level("INFO", "lightning.pytorch"):
        run(capsys, "predict", *arguments, "--ckpt_path", "last", "--model.max_new_tokens", "4")
    answers = [json.loads(line) for line in (run_dir / "predictions.jsonl").read_text().splitlines()]
    assert [answer["expected"] for answer in answers] == [row["output"] for row in make_rows(5)]
    assert all(set(answer) == {"id", "prompt", "question", "expected", "answer", "finish_reason"} for answer in answers)
    cut = sum(answer["finish_reason"] == "length" for answer in answers)  # two steps teach no end
    assert f"5 answers: {run_dir / 'predictions.jsonl'}; {cut} of them cut at max_new_tokens=4" in caplog.messages


def test_predict_answers_questions_and_overwrites_nothing(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    rows = [{"id": f"q{i}", "instruction": row["instruction"]} for i, row in enumerate(make_rows(5))]
    run_dir, out = tmp_path / "run", tmp_path / "new" / "sampled.jsonl"
    arguments = ["predict", *recipe(tmp_path, model_folder, None)[1:], "--run_dir", str(run_dir)]
    arguments += ["--data.test_path", write_rows(rows, "asked.json"), "--max_new_tokens", "6"]

    def answers(path: Path) -> list[tuple[str, None, str]]:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(line["id"], line["expected"], line["answer"]) for line in lines]

    run(capsys, *arguments)
    greedy = answers(run_dir / "predictions.jsonl")
    assert [(name, expected) for name, expected, _ in greedy] == [(f"q{i}", None) for i in range(5)]
    run(capsys, *arguments, "--temperature", "5", "--top_k", "1")
    assert answers(run_dir / "predictions-2.jsonl") == greedy  # of one token to draw from
    sampled = ["--temperature", "5", "--top_p", "0.9", "--seed", "4", "--out", str(out)]
    run(capsys, *arguments, *sampled)
    assert answers(out) != greedy
    assert "exists, and is not overwritten; name another file" in run(capsys, *arguments, *sampled, code=2)
    other = tmp_path / "other.jsonl"
    run(capsys, *arguments, *sampled[:-1], str(other), "--data.micro_batch_size", "5")
    assert answers(other) == answers(out)  # whatever the batches are
    assert "top_p=0.9 has no effect at temperature=0" in run(capsys, *arguments, "--top_p", "0.9", code=2)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--temperature", "-1"], "temperature=-1 must be 0 (greedy) or above, e.g. 0.7"),
        (["--temperature", "1e-300"], "temperature=1e-300 must be 0 (greedy) or at least 1e-15, e.g. 0.7"),
        (["--temperature", "1", "--top_p", "2"], "top_p=2 must be over 0 and at most 1"),
        (["--temperature", "1", "--top_k", "0"], "top_k=0 must be 1 token or more"),
        (["--seed", "5"], "seed=5 has no effect at temperature=0"),
        (["--out", "/proc/answers.jsonl"], "cannot be written"),
        (["--trainer.limit_predict_batches", "0"], "limit_predict_batches=0 leaves nothing to predict; give more, or"),
        ([], "there are no rows to answer; name them with --data.test_path FILE"),
    ],
)
def test_predict_refuses(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, option: list[str], message: str
) -> None:
    arguments = ["predict", *recipe(tmp_path, model_folder, None)[1:], "--run_dir", str(tmp_path / "run")]
    arguments += ["--data.test_path", write_rows([{"instruction": "a lamp"}])] if option else []
    assert message in run(capsys, *arguments, *option, code=2)


@pytest.mark.parametrize(("command", "option"), [("validate", "limit_val_batches"), ("test", "limit_test_batches")])
def test_nothing_to_measure_is_refused(
    capsys: Any, tmp_path: Path, model_folder: str, command: str, option: str
) -> None:
    arguments = [command, *recipe(tmp_path, model_folder, None)[1:], "--run_dir", str(tmp_path / "run")]
    assert f"trainer.{option}=0 leaves nothing to {command}" in run(capsys, *arguments, f"--trainer.{option}=0", code=2)


def test_a_command_that_logs_nothing_builds_no_logger(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some begin a run on a server as soon as they are built."""
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "")
    rows = write_rows([{"instruction": "a lamp", "output": "on"}] * 4)
    arguments = [*recipe(tmp_path, model_folder, rows)[1:], "--run_dir", str(tmp_path / "run")]
    arguments += ["--data.val_path", rows, "--trainer.logger", "own_classes.LoggerOfARun", "--allow_code=own_classes"]
    run(capsys, "validate", *arguments)
    assert "a logger begins a run on a server" in run(capsys, "fit", *arguments, code=2)


def test_someone_elses_module_and_data(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe_file = tmp_path / "own.yaml"
    recipe_file.write_text(
        yaml.safe_dump(
            {
                "model": {"class_path": "own_classes.OwnModule", "init_args": {"size": 3}},
                "data": {"class_path": "own_classes.OwnData"},
                "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
                "trainer": {
                    "max_steps": 2,
                    "accelerator": "cpu",
                    "enable_progress_bar": False,
                    "callbacks": [],
                    "logger": [{"class_path": "own_classes.OwnLogger"}],
                },
            }
        )
    )
    arguments = ["fit", "--config", str(recipe_file), "--run_dir", str(tmp_path / "run")]
    refused = run(capsys, *arguments, code=2)
    assert "is code outside of the packages of every recipe (lit_ft, " in refused
    assert "add --allow_code own_classes to the command, or own_classes to the list allow_code in" in refused
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "")  # what the command line allows stays in the environment of its process
    run(capsys, *arguments, "--allow_code", "own_classes")
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()
    assert (tmp_path / "run" / "own").is_dir()
    again = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())  # for other runs: with places of their own
    assert again["trainer"]["logger"][0]["init_args"] == {"save_dir": "here"}


@pytest.mark.parametrize("command", ["validate", "fit"])
def test_data_with_several_validation_loaders_are_refused_before_training(
    capsys: Any, tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "")
    arguments = ["--model.pretrained", model_folder, "--data", "own_classes.SeveralValidationSets"]
    arguments += ["--allow_code", "own_classes", "--trainer.accelerator", "cpu", "--run_dir", str(tmp_path / "run")]
    arguments += ["--trainer.num_sanity_val_steps", "0"] if command == "fit" else []
    refused = run(capsys, command, *arguments, code=2)
    assert "error: data: SeveralValidationSets.val_dataloader gives 2 loaders, and CausalLM takes one; ret" in refused
    assert not (tmp_path / "run" / "metrics.csv").exists()
    run(capsys, "test", *arguments)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "missing file": (["--data.path", "nope.json"], "'nope.json' does not exist; give a file, a folder, a glob"),
    "misspelt model option": (
        ["--model.pretraned", "x"],
        "model: unknown option 'pretraned'; did you mean 'pretrained'?",
    ),
    "misspelt data option": (["--data.max_lenght", "3"], "did you mean 'max_length'?"),
    "misspelt trainer option": (["--trainer.max_stepz", "3"], "did you mean 'trainer.max_steps'?"),
    "misspelt section": (["--optimiser.lr", "3"], "unknown option 'optimiser.lr'; here it is optimizer.lr"),
    "an option of another section": (
        ["--model.target_modules", "[q_proj]"],
        "model: unknown option 'target_modules'; it belongs to model.peft: model.peft.target_modules",
    ),
    "rows as sources": (
        ["--data.sources", "[{instruction: a}]"],
        "data.sources: unknown option 'instruction'; there are path, name, format, weight, max_rows, split, subset",
    ),
    "misspelt run option": (["--rundir", "3"], "did you mean 'run_dir'?"),
    "misspelt peft option": (["--model.peft.lora_alfa", "3"], "did you mean 'lora_alpha'?"),
    "wrong type": (["--data.max_length", "abc"], "data.max_length: 'abc' is no whole number"),
    "target modules": (["--model.peft.target_modules", "[q_prj]"], "['q_prj'] match nothing in Qwen2ForCausalLM"),
    "target pattern": (
        ["--model.peft.target_modules", "q_[proj"],
        "unterminated character set at position 2; correct the pattern",
    ),
    "a size of the model": (
        [
            "--model.peft",
            "peft.PrefixTuningConfig",
            "--model.peft.token_dim",
            "5",
            "--model.peft.num_virtual_tokens",
            "2",
        ],
        "model.peft: {'token_dim': 5} are sizes of the model, which are read from it; leave them out",
    ),
    "a value that names a file": (["--trainer.profiler", "/proc/self/mem"], "names a file that cannot be read"),
    "a late validation": (
        ["--trainer.val_check_interval", "1000"],
        "trainer.val_check_interval=1000 is more than the 11 micro-batches of an epoch; make it smaller, ",
    ),
    "a trainer's word": (["--learning_rate", "1e-4"], "unknown option 'learning_rate'; here it is optimizer.lr"),
    "a word in its section": (["--trainer.num_train_epochs", "1"], "here it is trainer.max_epochs"),
    "a short name": (["--optimizer", "adamw"], "optimizer: 'adamw' is no class path; write torch.optim.AdamW"),
    "a short schedule": (["--lr_scheduler", "cosine"], "write lit_ft.schedules.CosineWithWarmup"),
    "a class that there is not": (
        ["--trainer.callbacks", "lit_callbacks.LossLeger"],
        "there is no lit_callbacks.LossLeger; did you mean lit_callbacks.LossLedger?",
    ),
    "a negative learning rate": (["--optimizer.lr", "-1e-3"], "optimizer: ValueError: Invalid learning rate: -0.001"),
    "no GPU": (["--trainer.accelerator", "gpu"], "torch sees no accelerator here: leave trainer.accelerator out"),
    "a negative seed": (["--seed_everything", "-3"], "seed_everything=-3 must be 0 to 4294967295"),
    "a strategy that there is not": (
        ["--trainer.strategy", "zero3"],
        "write auto, ddp, or a class of lit_ft.strategies",
    ),
    "rank above the layer": (["--model.peft.r", "49"], "rank 49 is above the size of model.layers.0.self_attn.q_proj"),
    "another task": (["--model.peft.task_type", "SEQ_CLS"], "task_type=SEQ_CLS is not for causal language models"),
    "prompt method to be merged": (
        ["--merge", "true", "--model.peft", "peft.PromptTuningConfig", "--model.peft.num_virtual_tokens", "4"],
        "PROMPT_TUNING adds no weights that could be merged into the base (merge=true); leave merge out",
    ),
    "biases that have no place in a merged model": (
        ["--merge", "true", "--model.peft", "peft.BeftConfig", "--model.peft.target_modules", "[o_proj]"],
        "merge=true: BEFT trains biases, and model.layers.0.self_attn.o_proj has none to add them to; leave merge out",
    ),
    "LLaMA-Adapter without sizes": (
        ["--model.peft", "peft.AdaptionPromptConfig"],
        "model.peft: adapter_len and adapter_layers must be given; e.g. adapter_len: 10, adapter_layers: 2",
    ),
    "no checkpoint": (["--ckpt_path", "last"], "there is no checkpoint in"),
    "missing checkpoint": (
        ["--ckpt_path", "bset"],
        "ckpt_path='bset' does not exist; did you mean best? Or name a file",
    ),
    "unwritable": (["--run_dir", "/proc/lit_ft"], "cannot be written"),
    "no such recipe": (["--config", "nope.yaml"], "nope.yaml"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_exit_2_before_any_weights(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_ft.model.loading.load_base", lambda *_: pytest.fail("weights were loaded"))
    options, message = MISTAKES[name]
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    lines = run(capsys, *arguments, "--run_dir", str(tmp_path / "run"), *options, code=2)
    last = lines.strip().splitlines()[-1]
    assert last.startswith("lit_ft: error: ")
    assert message in last
    assert "Traceback" not in lines


def test_a_method_that_groups_rows_of_the_weights_is_resumed(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    arguments = [*recipe(tmp_path, model_folder, write_rows()), "--run_dir", str(tmp_path / "run")]
    arguments += ["--model.peft=peft.AdamssConfig", "--model.peft.r=8", "--model.peft.target_modules=[q_proj]"]
    run(capsys, *arguments, "--trainer.max_steps=1")
    run(capsys, *arguments, "--trainer.max_steps=2", "--ckpt_path=last")
    assert len(losses(tmp_path / "run")) == 2


def test_checkpoints_that_do_not_fit(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    run(capsys, *arguments, "--run_dir", str(tmp_path / "run"))
    monkeypatch.setattr("lit_ft.model.loading.load_base", lambda *_: pytest.fail("weights were loaded"))
    resume = [*arguments, "--run_dir", str(tmp_path / "run"), "--ckpt_path"]
    recipe_of_run = (tmp_path / "run" / "config.yaml").read_text()
    lines = run(capsys, *resume, "last", "--model.peft.r", "8", code=2)
    assert "the checkpoint does not fit the model: 8 of 8 weights differ" in lines
    lines = run(capsys, *resume, arguments[2], code=2)
    assert "is no Lightning checkpoint" in lines
    for name, advice in (
        ("adapter_config.json", "--model.adapter FOLDER"),
        ("config.json", "--model.pretrained FOLDER"),
    ):
        (theirs := tmp_path / name / "checkpoint-500").mkdir(parents=True)
        (theirs / "trainer_state.json").touch()
        (theirs / name).touch()
        assert advice in run(capsys, *resume, str(theirs), code=2)
    lines = run(capsys, *resume, "last", "--seed_everything", "5", code=2)
    assert "the checkpoint was written on other data: seed_everything was" in lines
    assert "--resume_data changed" in lines
    monkeypatch.undo()
    lines = run(capsys, *resume, "last", "--optimizer", "torch.optim.AdamW", "--trainer.max_steps", "2", code=2)
    assert (
        "the checkpoint is that of another optimizer, with dampening, momentum, nesterov and not amsgrad, betas"
        in lines
    )
    assert (tmp_path / "run" / "config.yaml").read_text() == recipe_of_run
    run(capsys, *resume, "last", "--seed_everything", "5", "--resume_data", "changed", "--trainer.max_steps", "2")
    assert "max_steps: 2" in (tmp_path / "run" / "config.yaml").read_text()
    caplog.clear()
    run(capsys, *resume, "last", "--optimizer.lr", "0.5", "--seed_everything", "5", "--trainer.max_steps", "3")
    assert "optimizer: by the recipe, lr is 0.5, no longer 0.1; all else" in caplog.text


def test_an_unknown_command(capsys: Any) -> None:
    for typed in ("fti", "FIT", "train"):
        assert "did you mean fit?" in run(capsys, typed, code=2)
    assert "; the command is the first word, e.g. fit" in run(capsys, "--config", "recipes/qwen.yaml", "fit", code=2)
    for typed, meant in {
        "merge": "export RUN --merge",
        "merge-lora": "export RUN --merge",
        "eval": "evaluate",
        "infer": "predict or chat",
        "webui": "board",
        "deploy": "serve",
    }.items():
        assert f"(did you mean {meant}?)" in run(capsys, typed, code=2)


def test_the_version(capsys: Any) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"lit_ft {__version__}\n"


def test_debug_shows_the_traceback(capsys: Any) -> None:
    assert "Traceback" in run(capsys, "fit", "--config", "nope.yaml", "--debug", code=2)


def test_workers_of_a_library_s_pool_end_in_silence(capfd: Any) -> None:
    with cli._exit_on_signals(), multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
        workers = multiprocessing.active_children()
    for worker in workers:
        worker.join(20)
    assert capfd.readouterr().err == ""


def test_a_signal_that_comes_during_a_fork_ends_the_new_process() -> None:
    with cli._exit_on_signals():
        for _ in range(40):
            process = os.fork()
            if process == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(process, signal.SIGTERM)  # before or after Python has set up the process
            assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGTERM


def test_a_job_that_was_stopped_is_resumed_as_its_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "config.yaml").touch()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    with pytest.raises(SystemExit, match="143"):
        cli._report(StopRequested(signal.SIGTERM, str(tmp_path / "checkpoints" / "last.ckpt")))
    assert f"with the same command and --run_dir {tmp_path} --resume auto\n" in capsys.readouterr().err


def test_the_output_of_a_compiler_is_cut(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli._report(RuntimeError("C++ compile error\n" + "warning: unused\n" * 10_000))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lit_ft: failed: RuntimeError: C++ compile error warning: unused")
    assert line.endswith("... (160,017 characters) (--debug shows where)")
    assert len(line) < 2100
