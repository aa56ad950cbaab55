"""The spec of what is trained: which modules have one."""

import pytest
from torch import nn

from lit_ft import CausalLM, RecipeError
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
