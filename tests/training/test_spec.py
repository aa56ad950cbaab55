"""The spec of what is trained: which modules have one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from shared_fixtures import make_tokenizer
from torch import nn
from transformers import CTRLConfig

from lit_ft import CausalLM, RecipeError
from lit_ft.model.spec import ModelSpec
from lit_ft.training.spec import TrainingSpec, spec_of


class OtherSpec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spec = {"tuning": "something else"}


def test_only_a_training_spec_counts(model_folder: str) -> None:
    assert isinstance(spec_of(CausalLM(model_folder)), TrainingSpec)
    assert spec_of(OtherSpec()) is None
    assert spec_of(nn.Linear(1, 1)) is None


def test_an_unknown_compile_backend_is_refused(model_folder: str) -> None:
    with pytest.raises(RecipeError, match="'inductr' is no mode and no backend of torch.compile; use true or .*eager"):
        CausalLM(model_folder, compile="inductr")
    assert CausalLM(model_folder, compile="aot_eager").spec.compile == "aot_eager"


@pytest.mark.parametrize("value", [True, "selective"])
def test_checkpointing_that_transformers_does_not_support_is_refused(value: Any, tmp_path: Path) -> None:
    CTRLConfig(vocab_size=400, n_embd=16, dff=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    module = CausalLM(str(tmp_path), init="random", gradient_checkpointing=value)
    message = f"model.gradient_checkpointing={str(value).lower()}: .* support it for CTRLLMHeadModel; set it to false"
    with pytest.raises(RecipeError, match=message):
        module.check()
    with pytest.raises(RecipeError, match=message):
        module.configure_model()


def test_an_adapter_is_drawn_from_the_seed_whatever_the_base_has_drawn(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5 and Mamba draw while they are built, at ZeRO-3 but not on one process."""

    def adapter() -> dict[str, torch.Tensor]:
        module = CausalLM(model_folder, peft=LoraConfig(r=2, target_modules=["q_proj"]))
        module.configure_model()
        return {name: parameter.detach() for name, parameter in module.trainable_parameters().items()}

    wanted, build = adapter(), ModelSpec.build

    def build_and_draw(*arguments: object) -> object:
        base = build(*arguments)  # type: ignore[arg-type]
        torch.rand(3)
        return base

    monkeypatch.setattr(ModelSpec, "build", build_and_draw)
    found = adapter()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
