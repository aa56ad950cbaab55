"""Values that no parser has compared with annotations: options given in Python."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_fixtures import tiny_qwen2
from torch import nn
from torch.optim import AdamW

from lit_ft import CausalLM, RecipeError, Source, TextDataModule
from lit_ft.errors import check_types


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init": "radnom"}, "model.init='radnom', and one of pretrained, random is needed"),
        ({"dtype": "fp32"}, "model.dtype='fp32', and one of auto, float32, bfloat16, float16 is needed"),
        ({"adapter_dtype": "bfloat16"}, "model.adapter_dtype='bfloat16', and one of float32, auto"),
        ({"gradient_checkpointing": "full"}, "model.gradient_checkpointing='full', and bool or selective"),
        ({"trainable": "norm"}, "model.trainable='norm', and a list of str or None"),
        ({"trainable": [1]}, r"model.trainable=\[1\], and a list of str or None"),
        ({"lr_factors": {"norm": "2"}}, "model.lr_factors={'norm': '2'}, and a mapping to float or None"),
        ({"peft": {"r": 4}}, "model.peft={'r': 4}, and PeftConfig or None"),
        ({"optimizer": 1e-3}, "model.optimizer=0.001, and a class or function that makes Optimizer, e.g. by functools"),
        ({"optimizer": AdamW([nn.Parameter(torch.zeros(1))])}, "model.optimizer is of type AdamW, and a class or"),
        ({"compile": 1}, "model.compile=1, and bool or str is needed"),
        ({"init_rows": True}, "model.init_rows=True, and int is needed"),
    ],
)
def test_an_option_of_the_model_of_another_type(options: Any, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        CausalLM("any", **options)


def test_a_model_in_place_of_its_name() -> None:
    model, tokenizer = tiny_qwen2()
    with pytest.raises(RecipeError, match=r"is of type Qwen2ForCausalLM, .* write it by its save_pretrained"):
        CausalLM(model)
    with pytest.raises(RecipeError, match=r"model.tokenizer is of type \w+, and str or None is needed; write it"):
        CausalLM("any", tokenizer=tokenizer)
    with pytest.raises(RecipeError, match="model.pretrained is of type Linear, and str is needed$"):
        CausalLM(nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overlong": "cut"}, "data.overlong='cut', and one of truncate, truncate_left_prompt, drop, error is"),
        ({"supervise": "answers"}, "data.supervise='answers', and one of assistant, last, all is needed"),
        ({"on_bad_row": "drop"}, "data.on_bad_row='drop', and one of error, skip is needed"),
        ({"format": "chatml"}, "data.format='chatml', and one of auto, alpaca"),
        ({"packing": "256"}, "data.packing='256', and int or bool or off or None is needed"),
        ({"micro_batch_size": "4"}, "data.micro_batch_size='4', and int is needed"),
    ],
)
def test_an_option_of_the_data_of_another_type(options: Any, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        TextDataModule("rows.json", **options)


def test_an_option_of_a_source_of_another_type() -> None:
    with pytest.raises(RecipeError, match=r"data.sources.document='page', and one of line, file is needed"):
        Source("rows.txt", document="page")  # type: ignore[arg-type]


def test_values_that_mean_the_same_are_taken() -> None:
    def made(path: str, size: int, share: float, names: list[str], make: type[AdamW] | None = None) -> None:
        """Nothing."""

    values = {"path": Path("folder"), "size": np.int64(2), "share": 1, "names": ("a", "b"), "make": None, "more": 3}
    check_types("model", made, values)
    module = CausalLM("any", dtype=torch.bfloat16, optimizer=partial(AdamW, lr=1e-3))  # type: ignore[arg-type]
    assert module.spec.base.dtype == "bfloat16"
