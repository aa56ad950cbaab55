"""The spec of what is trained: which modules have one."""

import pytest
import torch
from peft import LoraConfig
from torch import nn

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
