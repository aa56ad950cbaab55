"""Figures on held-out rows of models that no run has made."""

from typing import Any

import pytest
import torch
from shared_fixtures import make_tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, TextDataModule
from lit_ft.inference.opening import open_model
from lit_ft.scoring.held_out import held_out_scores

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen2"])
def test_under_autocast_the_loss_is_that_of_test(
    make_trainer: Any, write_rows: Any, tmp_path: Any, model_type: str
) -> None:
    """Routers compute in float32 in both."""
    folder, rows = str(tmp_path / "model"), write_rows()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(model_type)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    trainer = make_trainer(precision="bf16-mixed")
    (wanted,) = trainer.test(CausalLM(folder), TextDataModule(test_path=rows), verbose=False)
    opened = open_model(folder)
    scores, _ = held_out_scores(opened, TextDataModule(test_path=rows), "rows", "bf16-mixed", 2, 8)
    assert {one.metric: one.value for one in scores}["loss"] == wanted["test/loss"]
