"""Values of a recipe in place of those of config.json: merged, refused, trained with, and exported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import recipe, run
from transformers import AutoConfig, AutoModelForCausalLM

from lit_ft import CausalLM, RecipeError
from lit_ft.model.config.overrides import with_overrides
from lit_ft.model.config.positions import positions_of
from lit_ft.packed_batch import pack_samples

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_rope_parameters_are_merged_and_positions_grow() -> None:
    config = AutoConfig.for_model("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    got = with_overrides(config, {"rope_parameters": YARN, "attention_dropout": 0.1})
    assert got.rope_parameters == {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768}
    assert (got.max_position_embeddings, got.attention_dropout) == (131_072, 0.1)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    more = with_overrides(got, {"rope_parameters": {"factor": 8.0}})
    assert more.rope_parameters == {**got.rope_parameters, "factor": 8.0}
    assert more.max_position_embeddings == 262_144
    given = with_overrides(config, {"rope_parameters": YARN, "max_position_embeddings": 65_536})
    assert given.max_position_embeddings == 65_536


def test_another_kind_leaves_nothing_of_the_first() -> None:
    config = with_overrides(AutoConfig.for_model("llama"), {"rope_parameters": LLAMA3})
    assert config.max_position_embeddings == 8 * 2048
    got = with_overrides(config, {"rope_parameters": {"rope_type": "linear", "factor": 2}})
    assert got.rope_parameters == {"rope_type": "linear", "factor": 2, "rope_theta": 10000.0}
    assert positions_of(got.max_position_embeddings, got.rope_parameters) == 2 * 8 * 2048


def test_kinds_of_layers_and_parts_have_their_own() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    override = {"text_config": {"rope_parameters": {"full_attention": linear}, "sliding_window": 64}}
    text = with_overrides(AutoConfig.for_model("gemma3"), override).text_config
    assert text.rope_parameters["full_attention"] == {**linear, "rope_theta": 1_000_000.0}
    assert text.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert text.sliding_window == 64


def test_full_attention_that_is_extended_has_more_positions() -> None:
    config = AutoConfig.for_model("gemma3_text", max_position_embeddings=32_768)
    for own in ({}, {"max_position_embeddings": 131_072}):
        got = with_overrides(config, {"rope_parameters": {"full_attention": YARN}, **own})
        extended = {**YARN, "rope_theta": 1_000_000.0, "original_max_position_embeddings": 32_768}
        assert got.rope_parameters["full_attention"] == extended
        assert got.max_position_embeddings == 131_072


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown name": ({"rope_thetas": 1}, "the config of qwen2 has no 'rope_thetas'; it has attention_dropout, "),
    "the old name": ({"rope_scaling": YARN}, "has no 'rope_scaling'; rope_scaling is rope_parameters since"),
    "what every config has": ({"transformers_version": "1"}, "has no 'transformers_version'"),
    "an unknown parameter": ({"rope_parameters": {"factors": 2}}, "rope_parameters has no 'factors'; it has attention"),
    "an unknown kind": ({"rope_parameters": {"rope_type": "ntk"}}, "rope_type='ntk' is unknown; known are default, "),
    "a factor that shrinks": ({"rope_parameters": {**YARN, "factor": 0.5}}, "factor=0.5 must be a number of 1 or more"),
    "no mapping": ({"rope_parameters": 4}, "rope_parameters=4 must be a mapping, e.g. {rope_type: yarn"),
    "a parameter is missing": ({"rope_parameters": {"rope_type": "linear"}}, "Missing required keys in `rope_para"),
    "a list of another length": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0, 2.0]}},
        "long_factor must be a list of 64 numbers, one for each two rotated dimensions of a head, and is of 2",
    ),
    "another type": ({"hidden_size": "wide"}, "model.config_overrides: StrictDataclass"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(RecipeError, match="^model.config_overrides") as error:
        with_overrides(AutoConfig.for_model("qwen2"), overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rope",
    [
        *(YARN, LLAMA3, {"rope_type": "linear", "factor": 4}, {"rope_type": "dynamic", "factor": 4.0}),
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.5] * 3, "long_factor": [3.0, 6.0] * 3},
    ],
)
def test_a_packed_batch_has_the_losses_of_its_samples(model_folder: str, rope: dict[str, Any]) -> None:
    """With scaled positions too, they restart with each sample; one sample is longer than the unscaled model's 64."""
    rope = dict(rope)
    overrides = {"rope_parameters": rope}
    if rope["rope_type"] == "dynamic":
        overrides["max_position_embeddings"] = 64
    else:
        rope["original_max_position_embeddings" if rope["rope_type"] != "linear" else "rope_theta"] = 64
    module = CausalLM(model_folder, config_overrides=overrides)
    module.configure_model()
    plain = CausalLM(model_folder)
    plain.configure_model()
    rng = np.random.default_rng(0)
    samples = [(ids, ids) for ids in (rng.integers(0, 320, length) for length in (150, 30, 90))]
    with torch.no_grad():
        packed = module(pack_samples(samples)).per_token
        alone = [module(pack_samples([sample])).per_token for sample in samples]
        unscaled = plain(pack_samples(samples)).per_token
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)
    assert (packed - unscaled).abs().max() > 0.01


@pytest.mark.slow
def test_a_run_with_yarn_is_exported_with_it(capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    folder = tmp_path / "run"
    option = "{rope_parameters: {rope_type: yarn, factor: 2.0}}"
    command = [*recipe(tmp_path, model_folder, write_rows(), max_steps=1), "--run_dir", str(folder), "--merge"]
    said = run(capsys, *command, "--data.max_length", "700", code=2)
    assert "data.max_length of 700 tokens is beyond the 512 positions of model.pretrained=" in said
    assert "--model.config_overrides '{rope_parameters: {rope_type: yarn, factor: 1.37}}', or set data.max_le" in said
    run(capsys, *command, "--data.max_length", "700", "--model.config_overrides", option)
    merged = json.loads((folder / "merged" / "config.json").read_text())
    assert merged["max_position_embeddings"] == 1024
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
    assert merged["rope_parameters"] == rope
    ids = torch.arange(600)[None] % 320
    module = CausalLM(str(folder / "merged"), dtype="float32")
    module.configure_model()
    reloaded = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype="float32")
    row = ids[0].numpy()
    with torch.no_grad():
        logits = reloaded(ids).logits[0, :-1].float()
        expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        torch.testing.assert_close(module(pack_samples([(row, row)])).per_token, expected, atol=1e-4, rtol=1e-4)
    card = (folder / "adapter" / "README.md").read_text()
    assert 'Load the base with these values of its config: `{"rope_parameters": {"rope_type": "yarn"' in card
