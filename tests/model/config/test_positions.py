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


def test_learned_positions_have_no_scaling() -> None:
    with pytest.raises(RecipeError, match=r"of 2,000 tokens is beyond the 1,024 positions of it; set data.max_length="):
        check_positions(AutoConfig.for_model("gpt2"), 2000, "the longest sample", "it")
    check_positions(AutoConfig.for_model("mamba"), 10**9, "data.max_length", "it")
