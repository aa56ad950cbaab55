"""Architectures that fail in a precision of the trainer."""

from pathlib import Path
from typing import Any

import pytest
from shared_fixtures import make_tokenizer
from transformers import AutoConfig

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.model.isolation.architectures import check_precision, check_rounded

REFUSED = [
    ("dbrx", "bf16-mixed", "adds results in half precision to a sum in fp32"),
    ("dbrx", "16-mixed", "adds results in half precision to a sum in fp32"),
]


@pytest.mark.parametrize(("architecture", "precision", "reason"), REFUSED)
def test_a_precision_in_which_the_first_step_would_fail_is_refused(
    architecture: str, precision: str, reason: str
) -> None:
    with pytest.raises(RecipeError, match=f"^trainer.precision={precision}: {architecture} {reason}.*; set it to 32-"):
        check_precision(AutoConfig.for_model(architecture), precision)


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("dbrx", "bf16-true"), ("dbrx", "32-true"), ("inkling2_text", "bf16-true"), ("llama", "bf16-mixed")],
)
def test_others_are_not(architecture: str, precision: str) -> None:
    check_precision(AutoConfig.for_model(architecture), precision)


def test_a_model_that_computes_with_no_rounded_routers_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^1 weight in half precision: inkling2_text multiplies values in fp32 by"):
        check_rounded(AutoConfig.for_model("inkling2_text"), "1 weight in half precision")
    check_rounded(AutoConfig.for_model("deepseek_v3"), "1 weight in half precision")


def test_a_trainer_is_asked_before_weights_are_read(make_trainer: Any, tmp_path: Path) -> None:
    tiny_config("dbrx").save_pretrained(tmp_path)  # there are no weights
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "one two"}\n', encoding="utf-8")
    with pytest.raises(RecipeError, match="^trainer.precision=bf16-mixed: dbrx"):
        make_trainer(precision="bf16-mixed").fit(CausalLM(str(tmp_path)), TextDataModule(str(tmp_path / "rows.jsonl")))
