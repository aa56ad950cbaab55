"""Products that stay in float32 under autocast."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import (
    HfDeepSpeedConfig,
    is_deepspeed_zero3_enabled,
    unset_hf_deepspeed_config,
)

from benchmarks.model_comparison import Tiny, samples
from benchmarks.tiny_configs import tiny_config
from lit_ft.internals.transformers import weights_in_float32
from lit_ft.packed_batch import pack_samples
from lit_ft.training.float32.products import kept_modules
from lit_ft.tuning.targets.experts import expert_layers

MODELS = "deepseek_v4 glm4_moe hy_v3 hy_v4 inkling2_text kolibri1 lara_mini longcat_flash nemotron_h qwen3_moe".split()
"""Architectures whose routers or hyper-connections compute in float32, and one whose routers do not."""


def in_bfloat16(model_type: str) -> Tiny:
    """Model with the dtypes that transformers loads it in."""
    tiny = Tiny(tiny_config(model_type))
    assert isinstance(tiny.model, PreTrainedModel)
    in_float32 = weights_in_float32(tiny.model)
    for name, parameter in tiny.model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in in_float32 else torch.bfloat16)
    return tiny


def routers(tiny: Tiny) -> list[nn.Module]:
    paths = {name.rpartition(".")[0] for layer in expert_layers(tiny.model) for name in layer.router}
    return [tiny.model.get_submodule(path) for path in sorted(paths)]


@torch.no_grad()
def calls(tiny: Tiny, modules: list[nn.Module]) -> list[Callable[[], Any]]:
    """Calls of modules with what they get in a pass of the model."""
    found: list[Callable[[], Any]] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        kept = copy.deepcopy((args, kwargs))
        found.append(lambda: type(module).__call__(module, *kept[0], **kept[1]))

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    tiny.module.hidden_states(pack_samples([(ids, ids) for ids in samples()]))
    for hook in hooks:
        hook.remove()
    return found


def tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [part for part in output if isinstance(part, Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_routers_compute_under_autocast_as_in_the_model_that_is_served(model_type: str) -> None:
    tiny = in_bfloat16(model_type)
    found = calls(tiny, [*routers(tiny), *kept_modules(tiny.model)])
    assert found
    for call in found:
        with torch.no_grad():
            served = tensors(call())
            with torch.autocast("cpu", torch.bfloat16):
                trained = tensors(call())
        assert [one.dtype for one in trained] == [one.dtype for one in served]
        assert all(torch.equal(one, other) for one, other in zip(trained, served, strict=True))


def test_a_copy_of_a_module_computes_with_its_own_weights() -> None:
    [router, *_] = kept_modules(Tiny(tiny_config("glm4_moe")).model)
    other, hidden = copy.deepcopy(router), torch.randn(1, 3, 64)
    nn.init.zeros_(next(other.parameters()))
    assert not other(hidden)[0].any()
    assert router(hidden)[0].any()


def test_all_wrappers_of_a_router_belong_to_it() -> None:
    model = Tiny(tiny_config("deepseek_v3")).model
    for router in kept_modules(model):
        router.scale = nn.Parameter(torch.ones(4, 64))
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=["gate.weight", "gate.scale"]))
    for found in kept_modules(wrapped):
        assert isinstance(found, ParamWrapper)
        assert isinstance(found.base_layer, ParamWrapper)
        assert not isinstance(found.base_layer.base_layer, ParamWrapper)


def test_a_dense_model_has_none() -> None:
    assert kept_modules(Tiny(tiny_config("qwen3")).model) == []


def test_a_model_within_another_is_outlined_whole_under_zero_3() -> None:
    """transformers draws the weights of Fuyu's text model while the model around it is built."""
    tiny = Tiny(tiny_config("fuyu"))
    assert isinstance(tiny.model, PreTrainedModel)
    settings = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    try:
        assert weights_in_float32(tiny.model) == set()
        assert is_deepspeed_zero3_enabled()
    finally:
        unset_hf_deepspeed_config()
        del settings
