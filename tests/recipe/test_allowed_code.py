"""Recipes that name code: what is imported and called, and what is refused before that."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import recipe, run
from hostile import Evil

from lit_ft.commands.train import TrainingCLI
from lit_ft.errors import RecipeError
from lit_ft.recipe import allowed_code

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_is_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the settings of whoever runs the tests count, nor what an earlier test allowed."""
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv("LIT_FT_RUN_DIR", raising=False)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists once foreign code has run; the module ``downloaded`` makes it as it is imported."""
    mark = tmp_path / "ran"
    source = (
        "import torch\nclass Mine(torch.optim.SGD):\n    pass\ndef make(params, lr):\n    return Mine(params, lr)\n"
    )
    (tmp_path / "downloaded.py").write_text(f"open({str(mark)!r}, 'w').close()\n{source}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "downloaded", raising=False)
    return mark


def spec(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


SUBPROCESS = "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler"


def attacks(mark: Path = Path("/ran")) -> dict[str, tuple[str, Any]]:
    """Key of the recipe, and what stands there."""
    shell = spec("os.system", command=f"touch {mark}")
    process = spec(SUBPROCESS, entrypoint="touch", args=[str(mark)], env={}, stdout=None, stderr=None, local_rank_id=0)
    by_lightning = spec("lightning.pytorch.cli.instantiate_class", args=[], init=shell)
    quantization = spec("transformers.TorchAoConfig", quant_type=process)
    unpickled = spec("torch.load", f=str(mark.with_name("evil.pt")), weights_only=False)
    return {
        "a shell as optimizer": ("optimizer", shell),
        "a shell as schedule": ("lr_scheduler", shell),
        "a shell as model": ("model", shell),
        "a shell as peft": ("model.peft", shell),
        "a shell as callback": ("trainer.callbacks", [shell]),
        "a shell as logger": ("trainer.logger", shell),
        "a shell as strategy": ("trainer.strategy", shell),
        "a shell as plugin": ("trainer.plugins", [shell]),
        "a shell by way of torch": ("optimizer", {**shell, "class_path": "torch.os.system"}),
        "an import": ("optimizer", spec("downloaded.Mine", lr=0.1)),
        "an import as text": ("optimizer", "downloaded.Mine"),
        "a function of torch": ("optimizer", unpickled),
        "a function of Lightning": ("lr_scheduler", by_lightning),
        "a function of transformers": ("optimizer", spec("transformers.pipeline", task="x")),
        "a class of another kind": ("optimizer", process),
        "a class where anything goes": ("model.quantization", quantization),
        "a function where anything goes": ("model.quantization", spec("transformers.TorchAoConfig", quant_type=shell)),
        "the parser's own settings": ("optimizer", spec("jsonargparse.set_parsing_settings")),
    }


@pytest.mark.parametrize("name", attacks())
def test_a_recipe_runs_no_code(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, mark: Path, name: str
) -> None:
    torch.save(Evil(mark), tmp_path / "evil.pt")
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    content = yaml.safe_load(Path(arguments[2]).read_text())
    key, value = attacks(mark)[name]
    *sections, last = key.split(".")
    section = content
    for one in sections:
        section = section[one]
    section[last] = value
    Path(arguments[2]).write_text(yaml.safe_dump(content))
    for command in ("check", "fit")[: 1 + (name == "a shell as optimizer")]:
        line = run(capsys, command, *arguments[1:], code=2).strip().splitlines()[-1]
        assert line.startswith("lit_ft: error: ")
        assert key.split(".")[-1] in line.split(" is ")[0], line
    assert not mark.exists()
    assert "downloaded" not in sys.modules


def test_the_run_folder_of_someone_else_runs_no_code(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, mark: Path
) -> None:
    run_dir = tmp_path / "run"
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    run(capsys, *arguments, "--run_dir", str(run_dir))
    whole = (run_dir / "config.yaml").read_text()
    shell = spec("os.system", command=f"touch {mark}")
    for key, value in {
        "quantization": spec("transformers.TorchAoConfig", quant_type=shell),
        "peft": shell,
        "optimizer": shell,
    }.items():
        content = yaml.safe_load(whole)
        content["model"]["init_args"][key] = value
        (run_dir / "config.yaml").write_text(yaml.safe_dump(content))
        said = run(capsys, "export", "--run", str(run_dir), code=2)
        assert not mark.exists(), key
        assert "'os.system' is code outside of the packages" in said, key


HOW = {
    "command line": lambda _: ["--allow_code", "downloaded"],
    "command line, one word": lambda _: ["--allow_code=some.other,downloaded"],
    "environment": lambda patch: patch.setenv("LIT_FT_ALLOW_CODE", "downloaded") or [],
    "settings": lambda _: write_settings("allow_code: [downloaded]") or [],
}


def write_settings(text: str) -> None:
    allowed_code.settings_file().parent.mkdir(parents=True)
    allowed_code.settings_file().write_text(text)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("optimizer", [spec("downloaded.Mine", lr=0.1), "downloaded.Mine"])
def test_the_user_allows_modules(
    capsys: Any,
    tmp_path: Path,
    model_folder: str,
    write_rows: Any,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    optimizer: Any,
) -> None:
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    content = yaml.safe_load(Path(arguments[2]).read_text())
    content["optimizer"] = optimizer
    Path(arguments[2]).write_text(yaml.safe_dump(content))
    refused = run(capsys, "check", *arguments[1:], code=2)
    assert "add --allow_code downloaded to the command, or downloaded to the list allow_code in " in refused
    assert str(allowed_code.settings_file()) in refused
    assert not mark.exists()
    run(capsys, "check", *arguments[1:], *HOW[how](monkeypatch))
    assert mark.exists()


def test_a_recipe_allows_nothing(capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, mark: Path) -> None:
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    for key in ("allow_code", "LIT_FT_ALLOW_CODE", "import_path_allowlist"):
        content = {**yaml.safe_load(Path(arguments[2]).read_text()), key: ["downloaded"]}
        (tmp_path / "evil.yaml").write_text(yaml.safe_dump({**content, "optimizer": "downloaded.Mine"}))
        run(capsys, "check", "--config", str(tmp_path / "evil.yaml"), code=2)
    assert not mark.exists()


@pytest.mark.parametrize(
    "text", ["allow_code: downloaded", "[a]", "allow: [a]", "allow_code: ['../a']", "a: [", "&a [*a]"]
)
def test_settings_that_are_none(text: str) -> None:
    write_settings(text)
    with pytest.raises(RecipeError, match=r"settings\.yaml"):
        allowed_code.allowed_by_user()


@pytest.mark.parametrize("arguments", [["--allow_code"], ["--allow_code", "a b"], ["--allow_code=jsonargparse"]])
def test_names_that_are_no_modules(capsys: Any, arguments: list[str]) -> None:
    assert "is no module to be allowed" in run(capsys, "check", *arguments, code=2)


def test_a_downloaded_checkpoint_runs_no_code(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, mark: Path
) -> None:
    """Neither by its pickles nor by the options of a recipe that comes with it."""
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    checkpoint = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {}, "callbacks": Evil(mark)}, checkpoint)
    resume = [*arguments[1:], "--ckpt_path", str(checkpoint)]
    for command in ("fit", "validate", "test", "predict"):
        run(capsys, command, *resume, "--run_dir", str(tmp_path / command), code=2)
    own = tmp_path / "own.yaml"
    own.write_text(
        yaml.safe_dump(
            {
                "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
                "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
                "trainer": {"max_steps": 1, "accelerator": "cpu"},
                "ckpt_path": str(checkpoint),
                "weights_only": False,
            }
        )
    )
    run(capsys, "fit", "--config", str(own), "--run_dir", str(tmp_path / "own"), code=2)
    assert not mark.exists()


def test_strategies_that_unpickle_checkpoints_need_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import strategies as lightning_strategies

    from lit_ft import strategies

    for safe in (lightning_strategies.DDPStrategy(), strategies.FSDPStrategy(), strategies.ModelParallelStrategy()):
        allowed_code.check_unpickling(None, safe)
    with pytest.raises(RecipeError, match="weights_only=false lets a checkpoint run code; leave it out, or add"):
        allowed_code.check_unpickling(False, lightning_strategies.DDPStrategy())
    fsdp = lightning_strategies.FSDPStrategy()
    with pytest.raises(RecipeError, match=r"take lit_ft\.strategies' FSDPStrategy"):
        allowed_code.check_unpickling(None, fsdp)
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "pickle")
    allowed_code.check_unpickling(None, fsdp)


def test_what_was_allowed_for_one_run_is_not_for_the_next(tmp_path: Path, mark: Path, monkeypatch: Any) -> None:
    arguments = ["check", "--optimizer", "downloaded.Mine", "--model.pretrained", "x", "--data.path", "x"]
    monkeypatch.setattr(TrainingCLI, "instantiate_classes", lambda self: pytest.skip.Exception)
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "downloaded")
    allowed_code.enforce()
    monkeypatch.setenv("LIT_FT_ALLOW_CODE", "")
    with pytest.raises(RecipeError, match=r"'downloaded\.Mine' is code outside"):
        TrainingCLI(["fit", *arguments[1:]])
    assert "downloaded" not in sys.modules
