"""What is said when a run starts."""

import pytest
from transformers import CONFIG_MAPPING

from benchmarks.tiny_configs import tiny_config
from lit_ft.training.console import describe_draws


@pytest.mark.parametrize(
    ("architecture", "draws"),
    [
        ("gpt2", "resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1"),
        ("seed_oss", "attention_dropout=0.1, residual_dropout=0.1"),
        ("phimoe", "routers sample each token's experts"),
        ("gpt_neox", None),
        ("mixtral", None),
    ],
)
def test_a_model_that_draws_in_training_is_named(architecture: str, draws: str | None) -> None:
    """By the defaults of its config; ``tiny_config`` sets dropout to 0."""
    line = describe_draws(CONFIG_MAPPING[architecture]())
    assert (draws is None) if line is None else f"({draws})" in line
    assert architecture == "phimoe" or describe_draws(tiny_config(architecture)) is None
    assert "router_jitter_noise=0.1" in str(describe_draws(tiny_config("mixtral", router_jitter_noise=0.1)))
