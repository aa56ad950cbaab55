"""Frequencies that depend on a sequence's length are those of each sample, whatever else is in its row."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import COMMON
from shared_fixtures import make_tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from lit_ft import CausalLM, RecipeError
from lit_ft.commands.check import leak_probe
from lit_ft.model import rotary_embedding
from lit_ft.model.isolation import lengths
from lit_ft.packed_batch import pack_samples
from lit_ft.strategies import ModelParallelStrategy

LIMIT = 24
FACTORS = {"short_factor": [1.0] * 6, "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT, "max_position_embeddings": 96},
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT},
    "phimoe": {
        "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.5},
        "max_position_embeddings": 96,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(request.param, **{**COMMON, **ids, **MODELS[request.param]})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def alone(folder: str, ids: np.ndarray) -> torch.Tensor:
    """Token losses of Hugging Face's model, fresh from its folder, on one sample without padding."""
    row = torch.from_numpy(ids)[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")(row).logits[0, :-1]
    return cross_entropy(logits, row[0, 1:], reduction="none")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_samples_of_a_row_and_rows_after_one_another_have_frequencies_of_their_own(folder: str, attention: str) -> None:
    module = CausalLM(folder, attn_implementation=attention)
    module.configure_model()
    module.eval()
    generator = np.random.default_rng(0)
    samples = [generator.integers(0, 384, length) for length in (9, 60, LIMIT, LIMIT + 1, 40)]
    wanted = [alone(folder, ids) for ids in samples]
    with torch.no_grad():
        row = module(pack_samples([(ids, ids) for ids in samples])).per_token
        one_by_one = [module(pack_samples([(ids, ids)])).per_token for ids in samples]
    torch.testing.assert_close(row, torch.cat(wanted), atol=2e-5, rtol=1e-4)
    for got, reference in zip(one_by_one, wanted, strict=True):
        torch.testing.assert_close(got, reference, atol=2e-5, rtol=1e-4)


def test_rows_are_told_apart_by_their_positions_where_nobody_says_their_lengths() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])
    assert rotary_embedding._sample_lengths(positions) == [3, 1, 2]
    with lengths.samples_of([2, 4]):
        assert rotary_embedding._sample_lengths(positions) == [2, 4]
    assert rotary_embedding._sample_lengths(positions.expand(2, -1)) == [6]


def test_check_sees_samples_that_change_each_others_frequencies(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(folder) / "config.json"
    published = re.sub(rf"(max_position_embeddings\"): (?:{LIMIT}|96)\b", r"\1: 4096", path.read_text())
    assert published != path.read_text()
    path.write_text(published)  # the limit of published models is far above the probe's length
    assert leak_probe(CausalLM(folder)) == 0
    monkeypatch.setattr(rotary_embedding, "keep_samples_apart", lambda model: None)
    assert leak_probe(CausalLM(folder)) > 1e-3


def test_context_parallelism_is_refused(folder: str, make_trainer: Any) -> None:
    trainer = make_trainer(devices=2, strategy=ModelParallelStrategy(context_parallel_size=2))
    module = CausalLM(folder)
    with pytest.raises(RecipeError, match="context_parallel_size=2: the rotary frequencies of .* depend on the length"):
        trainer.strategy.check_model(module, module.check())
