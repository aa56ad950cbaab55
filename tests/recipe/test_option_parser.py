"""The command line as argparse gets it: files first, values with their options, lists that replace lists, help."""

from pathlib import Path

import pytest
import yaml
from command_line import recipe

from lit_ft import RecipeError
from lit_ft.cli import main
from lit_ft.recipe.option_parser import in_order


@pytest.mark.slow
def test_options_override_files_wherever_they_stand(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: str
) -> None:
    given = recipe(tmp_path, model_folder, "rows.json")
    for arguments in (["fit", "--data.max_length", "33", *given[1:]], [*given, "--data.max_length", "33"]):
        with pytest.raises(SystemExit):
            main([*arguments, "--print_config"])
        assert "max_length: 33" in capsys.readouterr().out


@pytest.mark.parametrize("init", ["lora_ga", "pissa_niter_4"])
def test_inits_that_the_type_hint_of_peft_lacks_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: str, init: str
) -> None:
    option = f"--model.peft.init_args.init_lora_weights={init}"
    with pytest.raises(SystemExit) as ended:
        main([*recipe(tmp_path, model_folder, "rows.json"), option, "--print_config"])
    assert ended.value.code in (None, 0)
    assert f"init_lora_weights: {init}\n" in capsys.readouterr().out


def test_files_are_first_and_negative_numbers_stay_with_their_option() -> None:
    assert in_order(["fit", "--a.b", "-1e-3", "--config", "x", "-c=y", "--c", "-5", "--d=-1", "-.5", "--config"]) == [
        *("fit", "--config", "x", "-c=y", "--config"),
        *("--a.b=-1e-3", "--c=-5", "--d=-1", "-.5"),
    ]
    assert in_order([]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data.system", "--data.system has no value behind it; add one"),
        ("--model.peft.r --trainer.max_steps 3", "--model.peft.r has no value behind it; add one"),
        ("--data.path --config x", "--data.path has no value behind it; add one"),
        ("-- --config x", "'--' stands alone; write --OPTION VALUE"),
        (
            "--data.sources[0].path x",
            r"--data.sources\[0\].path: items of a list have no options of their own; give all: ",
        ),
        ("--trainer.callbacks.1.top 3", r"have no options of their own; give all: --trainer.callbacks '\[...\]'"),
        ("--data.path = rows.json", "'=' stands alone; write --OPTION VALUE, or --OPTION=VALUE without spaces"),
    ],
)
def test_what_is_wrong_with_a_command_line(arguments: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        in_order(["fit", *arguments.split()])


def test_values_that_look_like_options() -> None:
    given = ["fit", "--data.system", "-- be kind", "--optimizer.lr", "-1e-3", "--merge", "--model.help", "--a.b", "-"]
    assert in_order(given) == [*given[:3], "--optimizer.lr=-1e-3", *given[5:7], "lit_ft.CausalLM", *given[7:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[{class_path: CSVLogger, init_args: {save_dir: a, name: ours}}]", "[{class_path: TensorBoardLogger, "),
        ("{class_path: CSVLogger, init_args: {save_dir: a, name: ours}}", " [{class_path: TensorBoardLogger, "),
    ],
)
def test_classes_of_a_list_get_nothing_of_what_the_list_replaces(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: str, before: str, after: str
) -> None:
    given = [*recipe(tmp_path, model_folder, "rows.json"), "--trainer.logger", before]
    for name, text in (("before", before), ("after", after := f"{after}init_args: {{save_dir: b}}}}]")):
        (tmp_path / f"{name}.yaml").write_text(f"trainer: {{logger: {text}}}\n")
    files = [f"--config={tmp_path / name}.yaml" for name in ("before", "after")]
    for options in (["--trainer.logger", after], [f"--trainer.logger={after}"], files):
        with pytest.raises(SystemExit):
            main([*(given if options != files else given[:-2]), *options, "--print_config"])
        (logger,) = yaml.safe_load(capsys.readouterr().out)["trainer"]["logger"]
        assert logger["class_path"].endswith("TensorBoardLogger")
        assert {name: logger["init_args"][name] for name in ("save_dir", "name")} == {
            "save_dir": "b",
            "name": "lightning_logs",
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shown", "hidden"),
    [
        ("--optimizer.help", "Help for --optimizer.help=torch.optim.AdamW", "--optimizer.params"),
        ("--lr_scheduler.help torch.optim.lr_scheduler.StepLR", "--lr_scheduler.step_size", "--lr_scheduler.optimizer"),
        ("--data.help", "--data.val_fraction VAL_FRACTION", ""),
        ("--data.sources.help", "Number of rows to read, from the first on; by default all.", ""),
        ("--model.help", "--model.pretrained PRETRAINED", ""),
        ("--model.peft.help LoraConfig", "--model.peft.r R", " --peft.r R"),
    ],
)
def test_help_on_classes(capsys: pytest.CaptureFixture[str], arguments: str, shown: str, hidden: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments.split()])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert shown in text
    assert not hidden or hidden not in text
