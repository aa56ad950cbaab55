"""Weights that a batch does not reach have a gradient of 0, whatever trains them."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from shared_fixtures import make_tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM
from lit_ft.packed_batch import pack_samples
from lit_ft.tuning.targets.unreached_at_times import unreached

EXPERTS = LoraConfig(target_modules=["o_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])


@pytest.mark.parametrize("peft", [None, EXPERTS], ids=["full", "LoRA on experts"])
def test_experts_that_no_token_reaches_have_a_gradient_of_zero(tmp_path: Path, peft: LoraConfig | None) -> None:
    """The router prefers the identity experts, the last half, in the first layer."""
    torch.manual_seed(0)
    config = tiny_config("longcat_flash", zero_expert_num=4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.model.layers[0].mlp.router.e_score_correction_bias[config.n_routed_experts :] = 9.0
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    module = CausalLM(str(tmp_path), peft=peft)
    module.configure_model()
    ids = torch.arange(5, 25)
    result = module(pack_samples([(ids.numpy(), ids.numpy())]))
    alone = model(input_ids=ids[None], labels=ids[None]).loss
    assert result.loss_sum.item() / 19 == pytest.approx(alone.item(), rel=1e-6)
    result.loss_sum.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    of_first = [g for name, g in gradients.items() if "layers.0.mlp.experts" in name]
    assert len(of_first) == (2 if peft is None else 4)
    assert all(g is not None and not g.any() for g in of_first)
    assert all(g is not None for g in gradients.values())
    if peft is None:
        assert len(names := unreached(module)) == 2
        assert all("layers.0.mlp.experts" in name for name in names)


@pytest.mark.parametrize("peft", [None, LoraConfig(target_modules="all-linear")], ids=["full", "LoRA"])
@pytest.mark.parametrize("tokens", [3, 20])
def test_compressors_of_short_samples_have_a_gradient_of_zero(
    tmp_path: Path, peft: LoraConfig | None, tokens: int
) -> None:
    """DeepSeek-V4 compresses four tokens to one key in some layers, and 128 in others."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v4"), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    module = CausalLM(str(tmp_path), peft=peft)
    module.configure_model()
    ids = torch.arange(5, 5 + tokens)
    result = module(pack_samples([(ids.numpy(), ids.numpy())]))
    alone = model(input_ids=ids[None], labels=ids[None]).loss
    assert result.loss_sum.item() / (tokens - 1) == pytest.approx(alone.item(), rel=1e-5)
    result.loss_sum.backward()
    gradients = {name: p.grad for name, p in module.trainable_parameters().items()}
    assert all(gradient is not None for gradient in gradients.values())
    without = [name for name, g in gradients.items() if ".compressor." in name and g is not None and not g.any()]
    assert without
    assert set(unreached(module)) <= set(without)
    assert (len(unreached(module)) == len(without)) or peft is not None  # factors A have none where B is 0
