"""Each "no" of the table of tuning methods is refused with its reason, before weights are read."""

import copy
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from tuning_methods import METHODS, NOT_COMBINED, NOT_TRAINED, ON_QUANTIZED_ONLY, PARAMETERS, TOKENS

from benchmarks.support_tables import headings
from lit_ft import CausalLM, RecipeError
from lit_ft.errors import first_refusal
from lit_ft.model import loading
from lit_ft.strategies import FSDPStrategy
from lit_ft.strategies.parallel.mesh import MeshSizes, ParallelDims
from lit_ft.strategies.zero import config as zero_config
from lit_ft.tuning import compatibility
from lit_ft.tuning.added_tokens import with_added_rows
from lit_ft.tuning.compatibility import check_quantized, check_situation, rows_of

ALL: dict[str, PeftConfig] = {**METHODS, **ON_QUANTIZED_ONLY, **PARAMETERS, **TOKENS, **NOT_COMBINED, **NOT_TRAINED}
NF4 = BitsAndBytesConfig(load_in_4bit=True)


def module(folder: str, method: str) -> CausalLM:
    return CausalLM(folder, peft=ALL[method], quantization=NF4 if method in ON_QUANTIZED_ONLY else None)


@cache
def skeleton(folder: str, method: str) -> nn.Module:
    return module(folder, method).check()


@cache
def base(folder: str) -> PreTrainedModel:
    return loading.skeleton(folder)


def on_mesh(**sizes: int) -> Callable[[str, str], None]:
    def check(folder: str, method: str) -> None:
        mesh = MeshSizes(**{"pipeline": 1, "data": 1, "context": 1, "tensor": 1, **sizes})
        dims = ParallelDims(mesh, 1)
        dims.check_model(mesh, module(folder, method), skeleton(folder, method))

    return check


CHECKS: dict[str, Callable[[str, str], Any]] = {
    "packed": skeleton,
    "merge": lambda folder, method: check_situation(ALL[method], "merge", "merge=true"),
    "combined": lambda folder, method: check_situation(ALL[method], "combined"),
    "added_tokens": lambda folder, method: with_added_rows(ALL[method], base(folder), [0]),
    "bitsandbytes": lambda folder, method: CausalLM(folder, peft=ALL[method], quantization=NF4),
    "torchao": lambda folder, method: check_quantized(ALL[method], "torchao"),
    "gptqmodel": lambda folder, method: check_quantized(ALL[method], "awq"),
    "otherwise_quantized": lambda folder, method: check_quantized(ALL[method], "quanto"),
    "fsdp": lambda folder, method: FSDPStrategy().check(Trainer(logger=False), module(folder, method)),
    "zero": lambda folder, method: zero_config.check_method(2, module(folder, method)),
    "zero3": lambda folder, method: zero_config.check_method(3, module(folder, method)),
    "tensor": on_mesh(tensor=2),
    "pipeline": on_mesh(pipeline=2),
    "context": on_mesh(context=2),
}
"""What a run of a recipe checks in each situation."""
NOES = [
    (situation, method)
    for situation in CHECKS
    for method, peft in ALL.items()
    if first_refusal(rows_of(peft), situation) is not None and (situation == "packed" or method not in NOT_TRAINED)
]


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_base", lambda *_, **__: pytest.fail("weights are read"))


@pytest.mark.parametrize(("situation", "method"), NOES)
def test_each_no_is_refused_with_its_reason(model_folder: str, situation: str, method: str) -> None:
    refused = first_refusal(rows_of(ALL[method]), situation)
    assert refused is not None
    row, reason, fix = refused
    with pytest.raises(RecipeError) as error:
        CHECKS[situation](model_folder, method)
    said = str(error.value)
    assert said.startswith(f"model.peft: {row.subject(ALL[method])} {reason}")
    assert said.endswith(fix)
    for advice, where in {"set stage to 2": "zero", "take lit_ft.strategies.FSDPStrategy": "fsdp"}.items():
        works = situation == "zero3" and compatibility.refusal(ALL[method], where) is None
        assert (advice in said) == works


def test_each_situation_and_each_row_is_tested() -> None:
    assert list(CHECKS) == list(headings(compatibility.METHODS[0]))
    assert {row.name for row in compatibility.METHODS} == {row.name for peft in ALL.values() for row in rows_of(peft)}


def test_the_table_has_all_methods_of_peft_and_all_variants_of_lora() -> None:
    names = {row.name for row in compatibility.METHODS}
    assert {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} <= names
    assert {option.name for option in fields(LoraConfig) if option.metadata.get("is_lora_variant")} <= names
    inits = {value for row in compatibility.METHODS if row.name == "init_lora_weights" for value in row.values}
    variants = next(option for option in fields(LoraConfig) if option.name == "init_lora_weights").metadata
    assert set(variants["lora_variants"]) <= inits


@pytest.mark.parametrize("method", ["LoRA", "KaSA", "VeLoRA", "BD-LoRA", "orthogonal"])
def test_lora_is_combined_where_peft_gives_the_sum(method: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in ("q_proj", "v_proj")})
    config = copy.deepcopy(ALL[method])
    config.task_type = None
    wrapped = get_peft_model(model, config, adapter_name="a")
    wrapped.add_adapter("b", copy.deepcopy(config))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn_like(parameter) / 10
    layer, x = wrapped.eval().base_model.model["q_proj"], torch.randn(5, 32)

    def output(adapter: str) -> torch.Tensor:
        wrapped.set_adapter(adapter)
        return (layer(x) - layer.base_layer(x)).detach()

    expected = 0.7 * output("a") + 0.3 * output("b")
    wrapped.base_model.add_weighted_adapter(["a", "b"], [0.7, 0.3], "c", "cat")
    is_sum = torch.allclose(output("c"), expected, atol=1e-6)
    assert is_sum == (compatibility.refusal(ALL[method], "combined") is None)


class Unheard(LoraConfig):
    """Config of a method that the table does not list."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type: Any = type("Kind", (str,), {"value": "UNHEARD"})("UNHEARD")


def test_a_method_that_is_not_listed_trains_where_nothing_is_assumed() -> None:
    for situation in headings(compatibility.NOT_LISTED):
        is_known = situation in ("packed", "merge", "fsdp", "zero", "pipeline", "context")
        assert (compatibility.refusal(Unheard(), situation) is None) == is_known, situation
    with pytest.raises(RecipeError, match=r"UNHEARD was not compared with one process \(stage=3\); set stage to 2"):
        check_situation(Unheard(), "zero3", "stage=3")


def test_messages_have_value_rule_and_fix() -> None:
    with pytest.raises(RecipeError) as error:
        check_quantized(METHODS["PiSSA, fast"], "gptq")
    assert str(error.value) == (
        "model.peft: init_lora_weights='pissa_niter_4' changes the base's weights, which would be rounded again when "
        "the base is quantized (quantization: gptq); take plain peft.LoraConfig (init_lora_weights may be loftq or "
        "eva), or a base that is not quantized"
    )
