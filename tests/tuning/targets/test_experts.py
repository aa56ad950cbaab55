"""What a LoRA config reaches in a mixture-of-experts model, and what is said of experts and routers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ATTENTION
from peft import LoraConfig, PeftModel
from transformers import BitsAndBytesConfig

from lit_ft import CausalLM, RecipeError
from lit_ft.tuning.targets import experts

NF4 = BitsAndBytesConfig(load_in_4bit=True)
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE_MLP = [f"model.layers.0.mlp.{name}_proj" for name in ("down", "gate", "up")]
SHARED = [f"model.layers.3.mlp.shared_experts.{name}_proj" for name in ("down", "gate", "up")]


def adapted(folder: str, **options: Any) -> tuple[set[str], PeftModel]:
    """Names of what LoRA is added to, without layers 1 and 2; and the model, without weights."""
    model = CausalLM(folder, peft=LoraConfig(**{"r": 4, **options})).check()
    assert isinstance(model, PeftModel)
    tuner: Any = model.base_model
    names = {*tuner.targeted_module_names, *tuner.targeted_parameter_names}
    return {name.removesuffix(".weight") for name in names if ".1." not in name and ".2." not in name}, model


def said(model: PeftModel, has_router_loss: bool = False) -> str:
    return "\n".join(experts.describe(model.get_base_model(), has_router_loss))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_all_linear_is_linear_layers_without_experts_and_routers(
    folder_of: Callable[[str], str], architecture: str
) -> None:
    """PEFT alone would train routers and experts of some of them, and leave out shared experts and dense layers."""
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    attention = attention if architecture == "deepseek_v3" else ATTENTION
    wanted = {f"model.layers.{layer}.self_attn.{name}" for layer in (0, 3) for name in attention}
    wanted |= {*DENSE_MLP, *SHARED} if architecture == "deepseek_v3" else set()
    found, model = adapted(folder_of(architecture), target_modules="all-linear")
    assert found == wanted
    assert "4 a layer and 2 a token: routers are frozen; experts are frozen (target_modules" in said(model)
    assert "target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj] trains them by LoRA" in said(model)
    found, model = adapted(folder_of(architecture), target_modules="all-linear", target_parameters=FUSED)
    assert found == wanted | {f"model.layers.{n}.{name}" for n in (0, 3) for name in FUSED} - (
        {f"model.layers.0.{name}" for name in FUSED} if architecture == "deepseek_v3" else set()
    )
    assert said(model).endswith("routers are frozen; experts train by LoRA on down_proj, gate_up_proj")


def test_names_and_patterns_reach_what_they_name(folder_of: Callable[[str], str]) -> None:
    deepseek, qwen = folder_of("deepseek_v3"), folder_of("qwen3_moe")
    assert adapted(deepseek, target_modules=["gate_proj", "up_proj", "down_proj"])[0] == {*DENSE_MLP, *SHARED}
    assert adapted(qwen, target_modules=r".*layers\.3\.self_attn\.o_proj")[0] == {"model.layers.3.self_attn.o_proj"}
    without = adapted(deepseek, target_modules="all-linear", exclude_modules=["o_proj", "gate_proj"])[0]
    assert not any(name.endswith((".o_proj", ".gate_proj")) for name in without)
    assert set(SHARED) & without


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3_moe", {"target_modules": ["gate"]}),
        ("gpt_oss", {"target_modules": ["router"]}),
        ("gpt_oss", {"target_modules": ["q_proj"], "modules_to_save": ["router"]}),
        ("deepseek_v3", {"target_modules": ["o_proj"], "modules_to_save": ["gate"]}),
    ],
)
def test_a_router_that_is_named_trains(
    folder_of: Callable[[str], str], architecture: str, options: dict[str, Any]
) -> None:
    module = CausalLM(folder_of(architecture), peft=LoraConfig(r=4, **options))
    module.configure_model()
    assert "routers train; experts are frozen" in module.expert_notes[0]
    ids = torch.arange(20)[None]
    module({"input_ids": ids, **BATCH}).loss_sum.backward()
    of_routers = {n: p.grad for n, p in module.trainable_parameters().items() if "gate" in n or "router" in n}
    assert of_routers
    assert any(grad is not None and grad.abs().max() > 0 for grad in of_routers.values())


BATCH: Any = {
    "position_ids": torch.arange(20)[None],
    "segment_lengths": [20],
    "predict_at": torch.arange(19),
    "targets": torch.arange(1, 20),
}


def test_the_auxiliary_loss_of_frozen_routers_is_said_to_move_other_layers(folder_of: Callable[[str], str]) -> None:
    _, model = adapted(folder_of("mixtral"), target_modules=["q_proj"])
    assert "routers are frozen, so their auxiliary loss moves the layers before them alone;" in said(model, True)


WRONG = {
    "modules": (
        {"target_modules": ["w1"]},
        r"\['w1'\] match nothing in .*; its experts train by target_parameters: \[",
    ),
    "pattern": (
        {"target_modules": ".*w1"},
        r"\['.\*w1'\] match nothing in .*; its experts train by target_parameters: \[",
    ),
    "no_names": ({"target_modules": []}, r"target_modules \[\] match nothing in .*; its experts train by"),
    "regex": ({"target_modules": "(w1"}, "target_modules: .*correct the pattern"),
    "experts_as_modules": ({"target_modules": ".*experts"}, "matches no linear layer of .*; its experts train by"),
    "parameters": (
        {"target_modules": ["q_proj"], "target_parameters": ["experts.w1"]},
        r"target_parameters \['experts.w1'\] match nothing in MixtralForCausalLM; its experts are "
        r"\['mlp.experts.gate_up_proj', 'mlp.experts.down_proj'\], its matrices \['lm_head.weight', 'mlp.gate.weight'",
    ),
    "dropout": ({"target_parameters": FUSED, "lora_dropout": 0.1}, "lora_dropout=0.1 with .*; set lora_dropout to 0"),
    "dora": ({"target_parameters": FUSED, "use_dora": True}, "use_dora=True with .*; set use_dora to false"),
    "layers": (
        {"target_modules": ["q_proj"], "target_parameters": FUSED, "layers_to_transform": [1]},
        r"layers_to_transform=\[1\] does not limit .* full names, e.g. model.layers.0.mlp.experts.gate_up_proj",
    ),
    "init": ({"target_parameters": FUSED, "init_lora_weights": "pissa"}, "'pissa' reads linear layers"),
    "rank": ({"target_parameters": FUSED, "r": 49}, r"rank 49 is above the size of model.layers.0.mlp.experts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(folder_of: Callable[[str], str], case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(RecipeError, match=message):
        adapted(folder_of("mixtral"), **options)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_options_that_shared_experts_do_not_have_are_refused_by_their_names(
    folder_of: Callable[[str], str], options: dict[str, Any]
) -> None:
    folder, (name, value) = folder_of("deepseek_v3"), next(iter(options.items()))
    message = f"{name}={value} with down_proj, gate_proj, up_proj of .*; set {name} to (0|false), or exclude_modules to"
    with pytest.raises(RecipeError, match=message):
        adapted(folder, target_modules="all-linear", **options)
    adapted(folder, target_modules="all-linear", exclude_modules=["gate_proj", "up_proj", "down_proj"], **options)


def test_a_quantized_base_keeps_its_experts_and_says_their_size(folder_of: Callable[[str], str]) -> None:
    peft = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=FUSED)
    module = CausalLM(folder_of("mixtral"), peft=peft, quantization=NF4)
    module.configure_model()
    size = sum(p.nbytes for n, p in module.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))) / 2**20
    assert module.expert_notes[1] == (
        f"fused experts are no linear layers and are not quantized: they take {size:,.1f} MiB in float32"
    )
    module({"input_ids": torch.arange(20)[None], **BATCH}).loss_sum.backward()
    grads = [p.grad for n, p in module.trainable_parameters().items() if "experts" in n and "lora_B" in n]
    assert all(float(grad.abs().max()) > 0 for grad in grads if grad is not None)
    module = CausalLM(folder_of("deepseek_v3"), peft=LoraConfig(r=4, target_modules="all-linear"), quantization=NF4)
    module.configure_model()
    trained = {name.split(".lora_")[0] for name in module.trainable_parameters()}
    assert {f"model.base_model.model.{name}" for name in (*DENSE_MLP, *SHARED)} <= trained
