"""Weights and buffers that stay in float32."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import save_model
from peft import LoraConfig
from shared_fixtures import make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.model_comparison import Tiny
from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.training.float32 import tensors

MODELS = "afmoe deepseek_v4 hunyuan_v1_moe inkling2_text kimi_linear llama phi4_multimodal zamba".split()
"""Architectures that name weights of float32 or create them so, one that has none, and one with configs of parts."""
ROUTER = "model.layers.1.mlp.gate.weight"


def dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def frozen(folder: Path) -> CausalLM:
    """DeepSeek-V3, one of whose two layers has a router."""
    module = CausalLM(save_model("deepseek_v3", folder, layers=2), dtype="float32")
    module.configure_model()
    return module.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_a_frozen_model_that_is_cast_has_the_dtypes_of_one_that_is_served(model_type: str, tmp_path: Path) -> None:
    tiny = Tiny(tiny_config(model_type))
    assert isinstance(tiny.model, PreTrainedModel)
    tiny.model.save_pretrained(tmp_path)
    served = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tiny.module.requires_grad_(False).to(torch.bfloat16)
    assert dtypes(tiny.model) == dtypes(served)
    assert torch.bfloat16 not in {buffer.dtype for buffer in tiny.model.buffers()}


def test_values_stay_too_and_a_copy_keeps_its_own(tmp_path: Path) -> None:
    model = frozen(tmp_path).model
    router = model.get_parameter(ROUTER)
    values = router.detach().clone()
    copied = copy.deepcopy(model)
    copied.get_parameter(ROUTER).data.zero_()
    copied.to(torch.bfloat16)
    assert copied.get_parameter(ROUTER).dtype == torch.float32
    assert not copied.get_parameter(ROUTER).any()
    assert model.to(torch.bfloat16).get_parameter(ROUTER) is router
    assert torch.equal(router, values)


def test_copies_that_train_are_cast(tmp_path: Path) -> None:
    peft = LoraConfig(target_modules=["q_a_proj"], modules_to_save=["mlp.gate"], task_type="CAUSAL_LM")
    module = CausalLM(save_model("deepseek_v3", tmp_path, layers=2), peft=peft, dtype="float32")
    module.configure_model()
    module.to(torch.bfloat16)
    kept = {name for name, parameter in module.named_parameters() if parameter.dtype == torch.float32}
    assert kept == {"model.base_model.model.model.layers.1.mlp.gate.original_module.weight"}
    with pytest.warns(
        UserWarning, match=r"^weights that .* in half precision \(1: .*gate.modules_to_save.default.weight, "
    ):
        tensors.warn_of_rounded(module._packed.base)


def test_nothing_is_said_of_weights_that_stay(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    module = frozen(tmp_path)
    tensors.warn_of_rounded(module.to(torch.bfloat16)._packed.base)
    assert [str(one.message) for one in recwarn if "half precision" in str(one.message)] == []


def test_trained_weights_are_cast_and_named(make_trainer: Any, write_rows: Any, tmp_path: Path) -> None:
    data, module = TextDataModule(write_rows(count=8), max_length=96), CausalLM(save_model("deepseek_v3", tmp_path))
    with pytest.warns(UserWarning, match=r"are in half precision \(.*; the loss differs from that of the"):
        make_trainer(max_steps=1, precision="bf16-true").fit(module, data)


def test_a_model_that_cannot_compute_with_them_is_refused(make_trainer: Any, write_rows: Any, tmp_path: Path) -> None:
    tiny_config("inkling2_text").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    data = TextDataModule(write_rows(count=8), max_length=96)
    with pytest.raises(RecipeError, match=r"are in half precision \(.*: inkling2_text multiplies values in fp32"):
        make_trainer(max_steps=1, precision="bf16-true").fit(CausalLM(str(tmp_path), init="random"), data)
