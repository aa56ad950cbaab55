"""Where Liger's kernels are refused."""

import sys

import pytest
import torch
from transformers import Qwen2Config

from lit_ft.errors import RecipeError
from lit_ft.model.liger_kernels import check


def test_a_missing_package_is_installed_as_any_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(RecipeError) as error:
        check(Qwen2Config(), torch.device("cuda"))
    assert str(error.value) == (
        "model.liger=true needs the package liger_kernel, which is not installed; pip install -e '.[liger]'"
    )
