"""Inits of LoRA that change the base."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, LoraGAConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft.packed_batch import TokenLoss, empty_batch
from lit_ft.tuning.lora_init import run_lora_init, with_default_init
from lit_ft.tuning.spec import TuningSpec
from lit_ft.tuning.wrapping import add_peft


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4"])
def test_weights_of_the_base_are_not_copied(init: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"), dtype=torch.float32)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    before = {name: (layer.weight.data_ptr(), layer.weight.detach().clone()) for name, layer in layers.items()}
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init)
    _, start = run_lora_init(model, config, lambda chosen: get_peft_model(model, chosen), [], print, lambda: model)
    for name, (place, weight) in before.items():
        assert layers[name].weight.data_ptr() == place
        assert torch.equal(layers[name].weight, weight) == ("q_proj" not in name)
    assert len(start["taken"]) == 2 * sum("q_proj" in name for name in layers)


@pytest.mark.parametrize("init", ["eva", "corda", "lora_ga"])
def test_an_init_without_settings_has_the_default_ones(init: str) -> None:
    """As a recipe gives it, where LoftQ's settings are there at their defaults."""
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init, loftq_config={"loftq_bits": 4})
    settings = [config.eva_config, config.corda_config, config.lora_ga_config]
    assert settings == [None] * 3
    TuningSpec.of(config, "float32", None, None)
    settings = [config.eva_config, config.corda_config, config.lora_ga_config]
    assert [one is not None for one in settings] == [name == init for name in ("eva", "corda", "lora_ga")]


def test_an_init_that_reads_data_trains_the_layers_that_all_linear_selects() -> None:
    """Whisper's decoder leaves out layers of which others, that it trains, have the last names."""
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
    model, other = (AutoModelForCausalLM.from_config(tiny_config("whisper")) for _ in range(2))

    def forward(_: object) -> TokenLoss:
        loss = model(torch.arange(3, 20)[None]).logits.square().sum()
        return TokenLoss(loss, torch.tensor(0), torch.zeros(0))

    batch = empty_batch()
    batch["terms"] = 1
    wrapped, _ = run_lora_init(model, config, lambda chosen: add_peft(model, chosen), [batch], forward, lambda: model)
    resumed = add_peft(other, with_default_init(config))
    assert wrapped.targeted_module_names == resumed.targeted_module_names
    assert not any("encoder_attn" in name for name in wrapped.targeted_module_names)


@pytest.mark.parametrize("init", ["lora_ga", "corda", "pissa", "olora"])
def test_an_init_trains_layers_that_are_given_as_parameters(init: str) -> None:
    """Dense layers and shared experts of DeepSeek-V3."""
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=init)
    TuningSpec.of(config, "float32", None, None)
    model, other = (AutoModelForCausalLM.from_config(tiny_config("deepseek_v3")) for _ in range(2))

    def forward(_: object) -> TokenLoss:
        return TokenLoss(model(torch.arange(3, 20)[None]).logits.square().sum(), torch.tensor(0), torch.zeros(0))

    batch = empty_batch()
    batch["terms"] = 1
    wrapped, start = run_lora_init(
        model, config, lambda chosen: add_peft(model, chosen), [batch], forward, lambda: model
    )
    resumed = add_peft(other, with_default_init(config, start))
    trained, wanted = ({name for name, p in m.named_parameters() if p.requires_grad} for m in (wrapped, resumed))
    assert trained == wanted
    given = [tensor for name, tensor in start["taken"].items() if "mlp" in name]
    assert len(given) == 2 * 3 * len(model.model.layers)
    assert all(tensor.any() for tensor in given)


@pytest.mark.parametrize(("architecture", "rank"), [("deepseek_v3", 4), ("deepseek_v3", 1), ("qwen2", 1)])
def test_layers_and_ranks_of_eva_are_those_of_its_config_and_of_a_resumed_run(
    tmp_path: Path, architecture: str, rank: int
) -> None:
    """Layers that are given as parameters (DeepSeek-V3) have their own ranks; those without a rank have no adapter."""
    config = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights="eva")
    TuningSpec.of(config, "float32", None, None)
    torch.manual_seed(0)
    model, other, plain, first = (AutoModelForCausalLM.from_config(tiny_config(architecture)) for _ in range(4))
    batch = empty_batch()
    batch["predict_at"] = torch.arange(60)

    def forward(_: object) -> TokenLoss:
        return TokenLoss(model(torch.arange(3, 63)[None]).logits.sum(), torch.tensor(0), torch.zeros(0))

    wrapped, start = run_lora_init(
        model, config, lambda chosen: add_peft(model, chosen), [batch], forward, lambda: model
    )
    ranks = _ranks(wrapped)
    of_mlp = {value for name, value in ranks.items() if "mlp" in name}
    assert of_mlp - {rank}
    assert (len(ranks) < len(_ranks(add_peft(first, with_default_init(config))))) == (rank == 1)
    assert _ranks(add_peft(other, with_default_init(config, start))) == ranks
    wrapped.active_peft_config.save_pretrained(str(tmp_path))
    assert _ranks(get_peft_model(plain, LoraConfig.from_pretrained(str(tmp_path)))) == ranks


def _ranks(model: nn.Module) -> dict[str, int]:
    return {name: layer.r["default"] for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
