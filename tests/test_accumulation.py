"""Numbers of optimizer steps, against those that a recipe gives."""

from typing import Any

import pytest

from lit_ft import CausalLM, TextDataModule


def test_more_least_steps_than_the_run_has_give_a_warning(
    make_trainer: Any, model_folder: str, write_rows: Any, recwarn: pytest.WarningsRecorder
) -> None:
    data = {"path": write_rows(), "micro_batch_size": 2, "max_length": 96}
    for least, said in ((1, False), (1000, True)):
        trainer = make_trainer(max_epochs=1, min_steps=least)
        trainer.fit(CausalLM(model_folder), TextDataModule(**data))
        line = f"the run ends after {trainer.global_step} optimizer steps (trainer.max_epochs=1); raise max_epochs"
        assert any(line in str(warning.message) for warning in recwarn) == said
