"""A base that a strategy casts layer by layer equals one that is loaded in its final dtype."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import save_model
from packaging.version import Version
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from lit_ft.model.files import deferred_cast
from lit_ft.model.loading import load_base
from lit_ft.training.causal_lm import CausalLM

IDS = torch.arange(5, 13)[None]
KEEPS_ROUTERS = Version(transformers.__version__) >= Version("5.24")
ROUTERS = {"model.layers.1.mlp.gate.weight"} if KEEPS_ROUTERS else set()
"""Weights of DeepSeek-V3 that stay in fp32."""


def rewrite(folder: Path, in_bfloat16: str, stated: str | None) -> None:
    """Cast the tensors of a folder whose names contain a text, and let config.json state a dtype."""
    weights = load_file(folder / "model.safetensors")
    weights |= {name: tensor.bfloat16() for name, tensor in weights.items() if in_bfloat16 in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": stated}))


def check_same(later: nn.Module, at_once: nn.Module) -> None:
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        found, wanted = dict(tensors(later)), dict(tensors(at_once))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "of_files", "dtype", "kept"),
    [
        ("qwen2", "bfloat16", "float32", set()),
        ("gemma2", "bfloat16", "float32", set()),  # a buffer, the embeddings' scale, is rounded where it is created
        ("gemma2", "float32", "bfloat16", set()),
        ("deepseek_v3", "float32", "bfloat16", ROUTERS),
        ("deepseek_v3", "bfloat16", "float16", ROUTERS),
        ("nemotron_h", "bfloat16", "float32", set()),  # its initial values are drawn
        ("gpt_oss", "bfloat16", "float16", {"model.norm.weight", "model.layers.0.input_layernorm.weight"}),
    ],
)
def test_weights_and_buffers_are_those_of_a_base_that_is_cast_at_once(
    tmp_path: Path, architecture: str, of_files: str, dtype: Any, kept: set[str]
) -> None:
    folder = save_model(architecture, tmp_path, layers=2)
    AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, of_files)).save_pretrained(folder)
    at_once = load_base(folder, dtype=dtype, attn_implementation="eager").eval()
    draws = torch.random.get_rng_state()
    with deferred_cast.casting_later():
        later = load_base(folder, dtype=dtype, attn_implementation="eager").eval()
    assert torch.equal(torch.random.get_rng_state(), draws)
    assert getattr(torch, of_files) in {parameter.dtype for parameter in later.parameters()}
    deferred_cast.cast(later)
    check_same(later, at_once)
    assert kept <= {name for name, parameter in later.named_parameters() if parameter.dtype == torch.float32}
    with torch.no_grad():
        assert torch.equal(later(input_ids=IDS).logits, at_once(input_ids=IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_bfloat16", "stated"),
    [
        ("no such name", "bfloat16"),
        ("no such name", None),
        ("embed_tokens", None),  # without a statement the first tensor's dtype is taken
        ("layers.1", "bfloat16"),
        ("layers.1", None),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_config_that_names_another_dtype_than_the_files_have_rounds_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], in_bfloat16: str, dtype: Any, stated: str | None
) -> None:
    folder = save_model("qwen2", tmp_path, layers=2)
    rewrite(tmp_path, in_bfloat16, stated)
    at_once = load_base(folder, dtype=dtype)
    capfd.readouterr()
    with deferred_cast.casting_later():
        later = load_base(folder, dtype=dtype)
    is_told = "have weights in torch.bfloat16 and torch.float32: until it is sharded" in capfd.readouterr().err
    assert is_told == (
        dtype == "float16" and (in_bfloat16, stated) in [("embed_tokens", None), ("layers.1", "bfloat16")]
    )
    deferred_cast.cast(later)
    check_same(later, at_once)


def test_copies_that_are_trained_have_the_dtypes_of_their_weights(tmp_path: Path) -> None:
    folder = save_model("deepseek_v3", tmp_path, layers=2)
    config = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["layers.1.mlp"], task_type="CAUSAL_LM")

    def built() -> CausalLM:
        module = CausalLM(folder, peft=config, dtype="bfloat16", adapter_dtype="auto")
        module.configure_model()
        deferred_cast.cast(module)
        return module

    at_once = built()
    with deferred_cast.casting_later():
        later = built()
    check_same(later, at_once)
    trained = {name.rpartition("default.")[2]: weight.dtype for name, weight in later.trainable_parameters().items()}
    assert trained["gate.weight"] == (torch.float32 if KEEPS_ROUTERS else torch.bfloat16)
    assert trained["shared_experts.up_proj.weight"] == torch.bfloat16
