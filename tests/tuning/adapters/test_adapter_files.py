"""Adapters are written from the weights that are given, whatever a rank holds of the model."""

from pathlib import Path

import pytest
import torch
from peft import PeftConfig, PeftModel, PromptEncoderConfig, PromptTuningConfig
from safetensors.torch import load_file

from lit_ft import CausalLM


@pytest.mark.parametrize(
    "method",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    ],
    ids=["prompt tuning", "P-tuning"],
)
def test_virtual_tokens_are_those_of_the_weights(model_folder: str, tmp_path: Path, method: PeftConfig) -> None:
    module = CausalLM(model_folder, peft=method)
    module.configure_model()
    model = module.model
    assert isinstance(model, PeftModel)
    trained = {name: torch.randn(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    module.save_adapter(tmp_path, trained)
    model.load_state_dict(trained, strict=False)
    expected = model.get_prompt_embedding_to_save("default")
    assert torch.equal(load_file(tmp_path / "adapter_model.safetensors")["prompt_embeddings"], expected)
