"""What ``target_modules: all-linear`` reaches in models that share weights, or read some without an adapter."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    RandLoraConfig,
    VeraConfig,
    get_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from peft.tuners.vera.layer import VeraLayer
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft import RecipeError
from lit_ft.tuning.wrapping import add_peft


def adapted(architecture: str, exclude: str | list[str] | None = None, method: type[PeftConfig] = LoraConfig) -> Any:
    """Last names of the layers that get an adapter; each has an effect on the logits."""
    model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    options: dict[str, Any] = {"r": 2} if exclude is None else {"r": 2, "exclude_modules": exclude}
    wrapped = add_peft(model, method(target_modules="all-linear", **options))
    for parameter in filter(lambda p: p.requires_grad, wrapped.parameters()):
        torch.nn.init.normal_(parameter, std=0.02)
    wrapped(
        input_ids=torch.arange(1, 300 if architecture == "deepseek_v4" else 40)[None]
    ).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in wrapped.parameters() if p.requires_grad)
    names = [*wrapped.targeted_module_names, *wrapped.targeted_parameter_names]
    return {name.removesuffix(".weight").rsplit(".", 1)[-1] for name in names}


def test_all_linear_leaves_out_what_mamba_reads_without_an_adapter(caplog: pytest.LogCaptureFixture) -> None:
    """With the kernels of mamba_ssm, which need a GPU, or always."""
    caplog.set_level("INFO", "lightning.pytorch")
    assert adapted("mamba") == {"in_proj"}
    assert (
        "all-linear leaves out dt_proj, out_proj, x_proj, whose weights MambaForCausalLM reads without" in caplog.text
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peft", "gate"),
    [
        (LoraConfig(r=16), None),
        (LoraConfig(r=1), 1),
        (LoraConfig(r=16, rank_pattern={"shared_expert_gate": 1}), 1),
        (AdaLoraConfig(init_r=16, total_step=900), None),
    ],
)
def test_all_linear_leaves_out_layers_that_are_smaller_than_the_rank(
    peft: LoraConfig, gate: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The gate of Qwen2-MoE's shared expert has one output."""
    caplog.set_level("INFO", "lightning.pytorch")
    peft.target_modules = "all-linear"
    wrapped = add_peft(AutoModelForCausalLM.from_config(tiny_config("qwen2_moe")), peft)
    ranks = {name.rsplit(".", 1)[-1]: m.r["default"] for name, m in wrapped.named_modules() if isinstance(m, LoraLayer)}
    assert ranks.pop("shared_expert_gate", None) == gate
    assert set(ranks.values()) == {1 if peft.r == 1 else 16}
    said = "all-linear leaves out shared_expert_gate (1 x 64), whose smaller dimension is below rank 16 (LoRA"
    assert (said in caplog.text) == (gate is None)


@pytest.mark.slow
@pytest.mark.parametrize("exclude", [["x_proj"], ".*x_proj"])
def test_so_it_does_beside_what_the_recipe_leaves_out(exclude: str | list[str]) -> None:
    names = adapted("jamba", exclude)
    assert {"in_proj", "out_proj", "q_proj"} < names
    assert not {"x_proj", "dt_proj"} & names


@pytest.mark.parametrize(("name", "layer"), [("granitemoehybrid", "out_proj"), ("gemma3n_text", "correction_coefs")])
def test_adapters_that_a_model_would_not_compute_are_refused(name: str, layer: str) -> None:
    """PEFT itself refuses those of Mamba and some others."""
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    with pytest.raises(
        RecipeError, match=f"reads the weight of model.*{layer} past an adapter, .* set them to all-lin"
    ):
        add_peft(model, LoraConfig(r=2, target_modules=["q_proj", layer]))


@pytest.mark.parametrize("name", ["mamba2", "zamba2"])
def test_norms_that_a_model_reads_itself_are_refused(name: str) -> None:
    options: dict[str, Any] = {"target_modules": r".*(\.norm|layernorm)"}
    with pytest.raises(RecipeError, match="reads the weight of .* past an adapter, .* leave such norms out") as error:
        add_peft(AutoModelForCausalLM.from_config(tiny_config(name)), LNTuningConfig(**options))
    said = re.search("exclude_modules: '(.+)'", str(error.value))
    assert said is not None
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    wrapped = add_peft(model, LNTuningConfig(**options, exclude_modules=said[1]))
    assert torch.isfinite(wrapped(input_ids=torch.arange(3, 9)[None]).logits).all()


LOST = {"laguna": "mlp.shared_experts.down_proj", "inkling2_text": "weight_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", LOST)
def test_all_linear_leaves_out_what_peft_would_not_load(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    wrapped = add_peft(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    name = LOST[architecture].rsplit(".", 1)[-1]
    assert re.search(rf"all-linear leaves out \d+ layers \(.*{name}.*\), whose LoRA weights PEFT renames", caplog.text)
    wrapped.save_pretrained(tmp_path)
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(model.config), str(tmp_path))
    weights = get_peft_model_state_dict(read)
    assert all(torch.equal(weights[name], one) for name, one in get_peft_model_state_dict(wrapped).items())


@pytest.mark.parametrize("architecture", LOST)
def test_adapters_that_peft_would_not_load_are_refused(architecture: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    layers = rf"{LOST[architecture]} is one of \d+ layers of {type(model).__name__} whose LoRA weights PEFT renames"
    with pytest.raises(RecipeError, match=rf"model.peft: \S*{layers} .*; leave them out \(exclude_modules\), or set"):
        add_peft(model, LoraConfig(r=2, target_modules=[LOST[architecture]]))


def test_other_models_keep_all_linear_layers() -> None:
    assert adapted("qwen2") == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("exclude", [None, ["out_proj"], ".*out_proj"])
def test_all_linear_leaves_out_layers_that_share_a_weight(
    exclude: str | list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    assert adapted("zamba", exclude) == {"in_proj", "linear", "out_proj"} - ({"out_proj"} if exclude else set())
    assert (
        "all-linear leaves out 14 layers (model.layers.2.shared_transf.self_attn.q_proj and "
        "model.layers.7.shared_transf.self_attn.q_proj), which could not be merged: each would get an adapter of "
    ) in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["linear", "q_proj"]},
        {"target_modules": r".*layers\.2\.shared_transf\..*q_proj"},
        {"target_modules": ["linear"], "modules_to_save": ["q_proj"]},
        {"target_modules": ["linear"], "modules_to_save": ["layers.2.shared_transf"]},
    ],
)
def test_adapters_on_layers_that_share_a_weight_are_refused(options: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("zamba"))
    with pytest.raises(
        RecipeError, match=r"layers\.2\..*q_proj and .*layers\.7\..*q_proj share their weight.*exclude_mod"
    ):
        add_peft(model, LoraConfig(r=2, **options))


def test_a_layer_of_groups_is_adapted_as_a_parameter_by_lora_and_left_out_by_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = {"q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", "gate_proj", "up_proj", "down_proj"}
    assert others | {"o_a_proj"} == adapted("deepseek_v4")
    caplog.set_level("INFO", "lightning.pytorch")
    assert others == adapted("deepseek_v4", method=LoHaConfig)
    assert "all-linear leaves out o_a_proj, whose weights DeepseekV4ForCausalLM reads without" in caplog.text
    model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v4"))
    with pytest.raises(
        RecipeError, match="LOHA does not fit model.layers.0.self_attn.o_a_proj of .* take peft.LoraCon"
    ):
        add_peft(model, LoHaConfig(r=2, target_modules=["o_a_proj", "q_a_proj"]))


def test_all_linear_leaves_out_a_router_that_returns_more_than_a_product(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    assert "router" not in adapted("phimoe", method=LoHaConfig)
    assert "all-linear leaves out router, which returns more than a product" in caplog.text


@pytest.mark.parametrize("method", [LoraConfig, VeraConfig, RandLoraConfig])
def test_all_linear_leaves_out_what_chooses_tokens(method: type[PeftConfig], caplog: pytest.LogCaptureFixture) -> None:
    """By ``exclude_modules``, which the configs of VeRA and RandLoRA lack."""
    caplog.set_level("INFO", "lightning.pytorch")
    mlp, attention = {"gate_proj", "up_proj", "down_proj"}, {"q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"}
    assert adapted("deepseek_v32", method=method) == mlp | attention | {"kv_a_proj_with_mqa"}
    assert "all-linear leaves out weights_proj, wk, wq_b of indexer, which chooses tokens, and a choice" in caplog.text


def test_a_method_without_exclude_modules_gets_the_names_of_the_other_layers() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("zamba"))
    wrapped = add_peft(model, VeraConfig(r=2, target_modules="all-linear"))
    linear = {name for name, module in model.named_modules() if isinstance(module, VeraLayer)}
    assert linear == set(wrapped.targeted_module_names)
    assert {name.rsplit(".", 1)[-1] for name in linear} == {"in_proj", "linear", "out_proj"}
    assert not any("shared_transf" in name for name in linear)


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        (["q_prj", "v_proj"], r"\['q_prj'\] match nothing in Qwen2ForCausalLM; .*'down_proj', 'gate_proj'"),
        (".*layers[.]9.*", r"\['\.\*layers\[\.\]9\.\*'\] match nothing in Qwen2ForCausalLM; correct or"),
        ("*", "model.peft: exclude_modules: .*nothing to repeat"),
    ],
)
@pytest.mark.parametrize("target", ["all-linear", ["q_proj", "v_proj"]])
def test_excluded_modules_that_match_nothing_are_refused(target: str | list[str], exclude: Any, message: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    with pytest.raises(RecipeError, match=message):
        add_peft(model, LoraConfig(r=2, target_modules=target, exclude_modules=exclude))


@pytest.mark.parametrize("saved", [["lm_hed"], ["lm_head", "embed_token"]])
def test_modules_to_save_that_match_nothing_are_refused(saved: list[str]) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    with pytest.raises(RecipeError, match=rf"modules_to_save \['{saved[-1]}'\] match nothing in Qwen2.*'lm_head'"):
        add_peft(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved))
