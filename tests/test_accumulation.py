"""Numbers of optimizer steps, against those that a recipe gives."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lit_ft import CausalLM, TextDataModule
from lit_ft.training.optimizers.schedules import CosineWithWarmup


def test_more_least_steps_than_the_run_has_give_a_warning(
    make_trainer: Any, model_folder: str, write_rows: Any, recwarn: pytest.WarningsRecorder
) -> None:
    data = {"path": write_rows(), "micro_batch_size": 2, "max_length": 96}
    for least, said in ((1, False), (1000, True)):
        trainer = make_trainer(max_epochs=1, min_steps=least)
        trainer.fit(CausalLM(model_folder), TextDataModule(**data))
        line = f"the run ends after {trainer.global_step} optimizer steps (trainer.max_epochs=1); raise max_epochs"
        assert any(line in str(warning.message) for warning in recwarn) == said


def test_a_run_that_goes_on_with_larger_steps_is_as_long_as_it_will_be(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    """Its earlier epochs had more steps; a schedule of fewer would be over, at a learning rate of 0."""
    lengths = []
    for epochs, accumulated, checkpoint in ((2, 1, None), (4, 4, tmp_path / "last.ckpt")):
        module = CausalLM(model_folder, lr_scheduler=partial(CosineWithWarmup, warmup=1))
        trainer = make_trainer(max_epochs=epochs, accumulate_grad_batches=accumulated)
        trainer.fit(module, TextDataModule(write_rows(), micro_batch_size=2, max_length=96), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        schedule = trainer.lr_scheduler_configs[0].scheduler
        assert isinstance(schedule, CosineWithWarmup)
        lengths.append((schedule.total_steps, trainer.global_step))
    (whole, steps), (longer, all_steps) = lengths
    assert (whole, longer) == (steps, all_steps)
    assert steps < all_steps < 2 * steps
