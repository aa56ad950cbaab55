"""What is said when a run starts and ends."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel
from transformers import CONFIG_MAPPING

from benchmarks.tiny_configs import tiny_config
from lit_ft.training.console import describe_draws, reasons_of_early_stops


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


class Stagnant(BoringModel):
    """Module whose validation loss is the same each time."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", 2.0)


@pytest.mark.parametrize("patience", [1, 9])
def test_the_reason_of_an_early_stop_is_said(patience: int) -> None:
    """At the second validation or, with a patience that is longer than the run, not at all."""
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    stop = EarlyStopping("val/loss", patience=patience)
    trainer = Trainer(max_epochs=3, limit_train_batches=1, limit_val_batches=1, callbacks=[stop], **options)
    trainer.fit(Stagnant())
    wanted = ["Monitored metric val/loss did not improve in the last 1 records. Best score: 2.000."]
    assert reasons_of_early_stops(trainer) == (wanted if patience == 1 else [])
