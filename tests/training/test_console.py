"""What is said when a run starts and ends."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel
from transformers import CONFIG_MAPPING

from benchmarks.tiny_configs import tiny_config
from lit_ft.data.loaders.batching import BatchPlan, PackedBatchLoader
from lit_ft.data.loaders.mixing import Mixing
from lit_ft.data.tokens.samples import collect, join
from lit_ft.training import console
from lit_ft.training.console import describe_draws, describe_steps, reasons_of_early_stops


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


def test_a_mixture_says_how_many_of_the_samples_an_epoch_takes(monkeypatch: Any) -> None:
    parts = [collect(ids := np.arange(4 * count, dtype=np.int32), ids, np.full(count, 4)) for count in (3, 20)]
    monkeypatch.setattr(console, "optimizer_steps", lambda _: 6)
    monkeypatch.setattr(console, "accumulation", lambda *_: 1)
    for strategy, wanted in (("first_exhausted", "6 of 23 samples"), ("all_exhausted", "40 samples")):
        plan = BatchPlan(1, mixing=Mixing(strategy, (1.0, 1.0)))
        loader = PackedBatchLoader(join(parts, ["small", "large"]), plan)
        trainer = SimpleNamespace(lightning_module=None, train_dataloader=loader)
        assert f"an epoch is {wanted}, " in describe_steps(trainer)
