"""A checkpoint is not read under options of a method that give its weights another meaning."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.pytorch import Trainer

from lit_ft import CausalLM
from lit_ft.errors import RecipeError
from lit_ft.tuning.adapters.recorded_options import options_of

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
CHANGES = {
    "alpha": (
        peft.LoraConfig,
        LORA,
        {"lora_alpha": 16},
        "was trained with lora_alpha=8, and model.peft has lora_alpha=16",
    ),
    "rsLoRA": (peft.LoraConfig, LORA, {"use_rslora": True}, "use_rslora=True, under which the same weights"),
    "alpha of a layer": (peft.LoraConfig, LORA, {"alpha_pattern": {"q_proj": 2}}, "alpha_pattern={'q_proj': 2}"),
    "other rows": (
        peft.LoraConfig,
        {**LORA, "trainable_token_indices": [5, 6]},
        {"trainable_token_indices": [7, 8]},
        "with trainable_token_indices=[5, 6], and",
    ),
    "another projection": (
        peft.VeraConfig,
        {"r": 4, "target_modules": ["q_proj"], "projection_prng_key": 0},
        {"projection_prng_key": 1},
        "with projection_prng_key=0, and model.peft has projection_prng_key=1",
    ),
}


def model_of(folder: str, method: peft.PeftConfig | None) -> Any:
    module = CausalLM(folder, peft=method)
    module.configure_model()
    return module


def saved(folder: str, method: peft.PeftConfig, tmp_path: Path) -> dict[str, Any]:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module = model_of(folder, method)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint: dict[str, Any] = torch.load(tmp_path / "x.ckpt", weights_only=True)
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_an_option_that_gives_weights_another_meaning_is_refused(model_folder: str, name: str, tmp_path: Path) -> None:
    config, options, change, message = CHANGES[name]
    checkpoint = saved(model_folder, config(**options), tmp_path)
    with pytest.raises(RecipeError) as refused:
        model_of(model_folder, config(**options | change)).on_load_checkpoint(checkpoint)
    assert message in str(refused.value)
    assert "resume with the peft that wrote it" in str(refused.value)


def test_other_options_may_change_and_earlier_versions_record_none(model_folder: str, tmp_path: Path) -> None:
    checkpoint = saved(model_folder, peft.LoraConfig(**LORA, lora_alpha=8), tmp_path)
    model_of(model_folder, peft.LoraConfig(**LORA, lora_alpha=8, lora_dropout=0.1)).on_load_checkpoint(checkpoint)
    del checkpoint["method_options"]
    model_of(model_folder, peft.LoraConfig(**LORA, lora_alpha=9)).on_load_checkpoint(checkpoint)
    assert options_of(model_of(model_folder, None).model) == {}
