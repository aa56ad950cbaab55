"""Lightning's own strategies that split weights are refused, by the command and by a trainer in Python."""

from pathlib import Path
from typing import Any

import pytest
from command_line import clean_environment, recipe  # noqa: F401 (a fixture)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeed
from lightning.pytorch.strategies import FSDPStrategy as LightningFSDP
from lightning.pytorch.strategies import ModelParallelStrategy as LightningModelParallel

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.cli import main
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lit_ft.training.steps.lightning_strategies import check_lightning_strategy

LIGHTNINGS = "lightning.pytorch.strategies.ModelParallelStrategy"
"""What the name of the class alone means, where nothing has imported ours."""


@pytest.mark.parametrize("own", [LightningModelParallel, LightningFSDP, LightningDeepSpeed])
def test_lightnings_own_are_refused_with_ours(own: Any) -> None:
    with pytest.raises(
        RecipeError, match=f"{own.__name__} is Lightning's own: .*; take lit_ft.strategies.{own.__name__}"
    ):
        check_lightning_strategy(own)


@pytest.mark.parametrize("ours", [ModelParallelStrategy, FSDPStrategy, DeepSpeedStrategy, DDPStrategy])
def test_ours_are_not(ours: Any) -> None:
    check_lightning_strategy(ours)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "check"])
def test_commands_refuse_it(
    tmp_path: Path, model_folder: str, write_rows: Any, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Ranks would train apart from each other, each on its own part of the data, to the end."""
    _, *options = recipe(tmp_path, model_folder, write_rows(), max_steps=1)
    place = ["--run_dir", str(tmp_path / "run")] if command == "fit" else []
    with pytest.raises(SystemExit) as ended:
        main([command, *options, *place, "--trainer.strategy.class_path", LIGHTNINGS])
    assert ended.value.code == 2
    assert "take lit_ft.strategies.ModelParallelStrategy" in capsys.readouterr().err


def test_a_trainer_in_python_refuses_it(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    with pytest.raises(RecipeError, match="ranks would train apart from each other"):
        make_trainer(max_steps=1, strategy=LightningModelParallel()).fit(
            CausalLM(model_folder), TextDataModule(write_rows())
        )
