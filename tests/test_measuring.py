"""The callbacks that look at samples and answers, with lit_ft's module and data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_rows
from lit_callbacks import LossLedger, SpikeGuard
from lit_callbacks.ledger_files import read_visits
from peft import LoraConfig

from lit_ft import CausalLM, Source, TextDataModule
from lit_ft.data.samples import collect, join
from lit_ft.rows import lay_end_to_end, sample_means


def test_means_of_samples_by_hand() -> None:
    """Three samples: two targets, none (its only label is its first token), three."""
    ids = np.arange(4)
    row = lay_end_to_end([(ids, np.array([-100, -100, 5, 6])), (ids[:1], ids[:1]), (ids, np.array([9, 1, 2, 3]))])
    means, tokens = sample_means(row, torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0]))
    assert means.tolist() == [1.5, 0.0, 5.0]
    assert tokens.tolist() == [2.0, 0.0, 3.0]


def test_ids_of_samples_name_source_row_and_piece() -> None:
    ids = np.zeros(6, dtype=np.int32)
    cut = collect(ids, ids, np.array([2, 2, 2]), rows=np.array([4, 4, 7]))
    whole = collect(ids, ids, np.array([3, 3]))
    samples = join([cut, whole], ["a.json", "b.json"])
    assert samples.ids(range(5)) == ["a.json:4", "a.json:4.1", "a.json:7", "b.json:0", "b.json:1"]
    assert samples.sources_of([1, 4]) == ["a.json", "b.json"]
    assert join([cut], []).ids([1]) == ["4.1"]


@pytest.mark.parametrize("packing", [None, 256])
def test_the_ledger_holds_the_loss_that_each_sample_has_alone(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, packing: int | None
) -> None:
    sources = [Source(write_rows(make_rows(6), "a.json")), Source(write_rows(make_rows(9)[6:], "b.json"))]
    data = TextDataModule(sources=sources, micro_batch_size=2, packing=packing, max_length=256)
    module = CausalLM(model_folder, peft=LoraConfig(r=2, target_modules="all-linear"))
    # A learning rate of 0: every visit sees the same model.
    module.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.0)
    make_trainer(max_epochs=1, callbacks=[LossLedger(), SpikeGuard()]).fit(module, data)
    visits = {visit.id: visit for visit in read_visits(tmp_path / "loss_ledger")}
    samples = data.splits["train"]
    assert sorted(visits) == sorted(samples.ids(range(9)))
    assert {visit.source for visit in visits.values()} == {"a", "b"}
    for i, name in enumerate(samples.ids(range(9))):
        alone = lay_end_to_end([samples[i]])
        assert visits[name].tokens == len(alone["targets"])
        assert visits[name].loss == pytest.approx(float(module(alone).per_token.mean()), rel=1e-4)
