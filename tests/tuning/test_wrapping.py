"""What ``target_modules: all-linear`` reaches in models that read some weights without an adapter."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft.tuning.wrapping import add_peft


def adapted(architecture: str, exclude: str | list[str] | None = None) -> set[str]:
    """Last names of the layers that get an adapter; each has an effect on the logits."""
    model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    peft = LoraConfig(r=2, target_modules="all-linear", exclude_modules=exclude, init_lora_weights=False)
    wrapped = add_peft(model, peft)
    wrapped(input_ids=torch.arange(1, 9)[None]).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in wrapped.parameters() if p.requires_grad)
    return {name.rsplit(".", 1)[-1] for name in wrapped.targeted_module_names}


@pytest.mark.parametrize("exclude", [None, ["x_proj"], ".*x_proj"])
def test_all_linear_leaves_out_what_mamba_reads_without_an_adapter(
    exclude: str | list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    assert adapted("mamba", exclude) == {"in_proj", "x_proj"} - ({"x_proj"} if exclude else set())
    assert "all-linear leaves out dt_proj, out_proj, whose weights MambaForCausalLM reads without" in caplog.text


def test_other_models_keep_all_linear_layers() -> None:
    assert adapted("qwen2") == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
