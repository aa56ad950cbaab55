"""Positions that a model is made for, by the configs of published models, and the advice for longer samples."""

import re
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from lit_ft import RecipeError
from lit_ft.model.config.overrides import with_overrides
from lit_ft.model.config.positions import check_positions, positions_of

PUBLISHED: dict[str, tuple[int, dict[str, Any], int]] = {
    "Qwen2.5": (32_768, {"rope_type": "default", "rope_theta": 1e6}, 32_768),
    "Qwen2.5 with YaRN, as its card says": (
        32_768,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        131_072,
    ),
    "Llama 3.1": (
        131_072,
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        131_072,
    ),
    "gpt-oss": (131_072, {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 131_072),
    "DeepSeek-V2": (163_840, {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163_840),
    "Phi-3": (131_072, {"rope_type": "longrope", "original_max_position_embeddings": 4096}, 131_072),
    "Vicuna 1.5 16k": (4096, {"rope_type": "linear", "factor": 4.0}, 16_384),
    "GPT-2": (1024, {}, 1024),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_positions_of_published_configs(name: str) -> None:
    stated, rope, positions = PUBLISHED[name]
    assert positions_of(stated, rope) == positions


@pytest.mark.parametrize("architecture", ["qwen2", "gpt_oss", "gemma3_text", "gemma3", "qwen3_5_text"])
def test_the_advice_works(architecture: str) -> None:
    config = AutoConfig.for_model(architecture)
    limit = config.get_text_config().max_position_embeddings
    check_positions(config, limit, "data.max_length", "it")
    check_positions(config, None, "data.max_length", "it")
    with pytest.raises(RecipeError) as error:
        check_positions(config, 3 * limit + 1, "data.max_length", "it")
    said = re.search(r"--model.config_overrides '(.+)', or set data.max_length=(\d+)$", str(error.value))
    assert said is not None
    assert int(said[2]) == limit
    check_positions(with_overrides(config, yaml.safe_load(said[1])), 3 * limit + 1, "data.max_length", "it")


def by_kind(**full: Any) -> dict[str, Any]:
    return {
        "full_attention": {"rope_theta": 1e6, **full},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }


PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 128, "long_factor": [2.0] * 128}


@pytest.mark.parametrize(
    ("architecture", "given", "advised"),
    [
        ("gemma3_text", {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}),
        ("gemma3_text", {"rope_type": "linear", "factor": 8.0}, {"rope_type": "linear", "factor": 16.0}),
        ("gemma4_text", PROPORTIONAL, {**PROPORTIONAL, "factor": 2.0}),
        (
            "olmo3",
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
            {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512},
        ),
    ],
)
def test_the_advice_keeps_the_kind_of_full_attention(
    architecture: str, given: dict[str, Any], advised: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(architecture, rope_parameters=by_kind(**given), max_position_embeddings=4096)
    with pytest.raises(RecipeError) as error:
        check_positions(config, 8192, "data.max_length", "it")
    said = re.search(r"--model.config_overrides '(.+)', or set", str(error.value))
    assert said is not None
    got = with_overrides(config, yaml.safe_load(said[1]))
    assert got.rope_parameters == by_kind(**advised)
    assert got.max_position_embeddings == 8192


def test_a_kind_of_full_attention_without_one_factor_has_no_advice() -> None:
    rope = by_kind(**LONGROPE, factor=4.0, original_max_position_embeddings=1024)
    config = AutoConfig.for_model("gemma3_text", rope_parameters=rope, max_position_embeddings=4096)
    with pytest.raises(RecipeError, match=r"beyond the 4,096 positions of it; set data.max_length=4096$"):
        check_positions(config, 8192, "data.max_length", "it")


def test_learned_positions_have_no_scaling() -> None:
    with pytest.raises(RecipeError, match=r"of 2,000 tokens is beyond the 1,024 positions of it; set data.max_length="):
        check_positions(AutoConfig.for_model("gpt2"), 2000, "the longest sample", "it")
    check_positions(AutoConfig.for_model("mamba"), 10**9, "data.max_length", "it")
