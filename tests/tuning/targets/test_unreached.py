"""Weights that get no gradient from text do not train, and checkpoints and bases are checked accordingly."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.model_comparison import ARCHITECTURES
from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError
from lit_ft.model.files.text_part import config_of_text
from lit_ft.model.isolation.architectures import REFUSED
from lit_ft.model.loading import load_base
from lit_ft.model.spec import ModelSpec
from lit_ft.tuning.spec import TuningSpec
from lit_ft.tuning.targets import unreached


@pytest.mark.parametrize(
    ("architecture", "part"),
    [("deepseek_v32", "indexer"), ("whisper", "encoder_attn"), ("fuyu", "vision_embed_tokens"), ("qwen2", "")],
)
def test_weights_that_are_not_frozen_get_a_gradient(
    architecture: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    model(input_ids=torch.arange(1, 60)[None], use_cache=False).logits.square().sum().backward()
    without = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    unreached.freeze(model)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} >= without
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    line = f"{len(without)} weights are frozen, as they get no gradient: {part}" if part else ""
    assert line in caplog.text
    assert bool(line) == bool(without) == bool(caplog.text)


@pytest.mark.parametrize("architecture", ["afmoe", "ernie4_5_moe", "hrm_text", "laguna"])
def test_weights_that_an_architecture_freezes_stay_frozen_when_they_are_read(tmp_path: Path, architecture: str) -> None:
    """transformers makes all weights that it reads trainable, except under ZeRO-3."""
    model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    model.save_pretrained(tmp_path)
    read = load_base(str(tmp_path))
    unreached.freeze(read)
    assert frozen == {name for name, p in read.named_parameters() if not p.requires_grad} != set()


@pytest.mark.slow
def test_the_architectures_that_have_such_weights_are_listed() -> None:
    for name in {*ARCHITECTURES, *unreached.ARCHITECTURES} - set(REFUSED):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of_text(tiny_config(name)))
        has = bool(unreached.names_within(name for name, _ in model.named_parameters()))
        assert has == (name in unreached.ARCHITECTURES), name


def test_patterns_that_name_only_such_weights_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("deepseek_v32"))
    with pytest.raises(RecipeError, match=r"names weights alone that get no gradient: indexer, which chooses tokens"):
        TuningSpec(trainable=["indexer"]).wrap_skeleton(model, [], None)


@pytest.mark.parametrize(("architecture", "is_whole"), [("deepseek_v32", False), ("qwen2", True)])
def test_a_base_of_which_a_part_is_frozen_is_no_longer_replaced_by_the_checkpoint(
    tmp_path: Path, architecture: str, is_whole: bool
) -> None:
    """A checkpoint holds what trains: the frozen part comes from the base, which must be the same one."""
    tiny_config(architecture).save_pretrained(tmp_path)
    assert TuningSpec().trains_everything(ModelSpec(str(tmp_path), str(tmp_path))) == is_whole
    module = CausalLM(str(tmp_path), init="random")
    assert (module.base_fingerprint is None) == is_whole
