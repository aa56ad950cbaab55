"""Figures on held-out rows of models that no run has made."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from shared_fixtures import make_tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.inference.opening import open_model
from lit_ft.scoring.held_out import data_of, held_out_scores

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


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_samples_beyond_the_positions_are_warned_of_where_there_are_further_ones(
    write_rows: Any, tmp_path: Any, model_type: str
) -> None:
    folder, rows = str(tmp_path / "model"), write_rows([{"prompt": "red cup " * 60, "completion": "blue"}] * 2)
    config = tiny_config(model_type)
    config.max_position_embeddings = 100
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    opened, data = open_model(folder), TextDataModule(test_path=rows)
    beyond = r"the longest sample of \d{3} tokens is beyond the 100 positions of .*; .*--data.max_length=100"
    if model_type == "gpt2":
        with pytest.raises(RecipeError, match=beyond):
            held_out_scores(opened, data, "rows", None, 2, 8)
        return
    with pytest.warns(UserWarning, match=f"losses are measured all the same: {beyond}"):
        scores, _ = held_out_scores(opened, data, "rows", None, 2, 8)
    assert all(math.isfinite(one.value) for one in scores)


def test_a_run_that_streamed_is_evaluated_on_all_rows(tmp_path: Path, write_rows: Any) -> None:
    """A file of its own is no stream, so that the options of one have no effect."""
    options = {"streaming": True, "shuffle_buffer": 7, "path": "gone.json", "max_length": 96, "mixing": "all_exhausted"}
    model = {"class_path": "lit_ft.CausalLM", "init_args": {"pretrained": "gone"}}
    config = {
        "seed_everything": 1,
        "trainer": {},
        "model": model,
        "data": {"class_path": "lit_ft.TextDataModule", "init_args": options},
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    found = data_of(str(tmp_path / "run"), str(tmp_path / "run"), {"test_path": write_rows()})
    assert (found.streaming, found.max_length) == (False, 96)
