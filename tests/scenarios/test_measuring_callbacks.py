"""The callbacks that look at samples and answers, with lit_ft's module and data."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lit_callbacks import ForgettingProbe, LossLedger, SampleGenerations, SpikeGuard, SpikesPersist, protocols
from lit_callbacks.loss_ledger.ledger_files import read_visits
from lit_callbacks.output.step_lines import read_lines
from peft import LoraConfig
from ranks import on_ranks
from shared_fixtures import make_rows

from lit_ft import CausalLM, Source, TextDataModule
from lit_ft.data.tokens.samples import collect, join
from lit_ft.model.generation import dense_attention
from lit_ft.packed_batch import pack_samples, sample_targets
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy


def test_targets_of_samples_by_hand() -> None:
    """Three samples: two targets, none (its only label is its first token), three."""
    ids = np.arange(4)
    row = pack_samples([(ids, np.array([-100, -100, 5, 6])), (ids[:1], ids[:1]), (ids, np.array([9, 1, 2, 3]))])
    assert sample_targets(row) == [2, 0, 3]


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
    summary = json.loads((tmp_path / "loss_ledger" / "summary.json").read_text())
    for i, name in enumerate(samples.ids(range(9))):
        (sample,) = [one for one in summary["worst"] if one["id"] == name]
        assert sample["text"] == module.tokenizer.decode(samples[i][0])[:500]
        alone = pack_samples([samples[i]])
        assert visits[name].tokens == len(alone["targets"])
        assert visits[name].loss == pytest.approx(float(module(alone).per_token.mean()), rel=1e-4)


def test_the_probe_reads_texts_token_by_token(model_folder: str) -> None:
    module = CausalLM(model_folder)
    module.configure_model()
    texts = ["some words", "some other words"]
    total, tokens = module.text_loss(texts)
    encoded = [torch.tensor([module.tokenizer(text)["input_ids"]]) for text in texts]
    with dense_attention(module.base_model):
        means = [module.base_model(input_ids=ids, labels=ids).loss * (ids.numel() - 1) for ids in encoded]
    assert tokens == sum(ids.numel() - 1 for ids in encoded)
    assert float(total) == pytest.approx(float(sum(means)), rel=1e-5)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp": FSDPStrategy,
    "zero-2": lambda: DeepSpeedStrategy(stage=2),
    "zero-3": lambda: DeepSpeedStrategy(stage=3),
}


def all_of_them(make_trainer: Any, model_folder: str, data: str, folder: str, strategy: str | None) -> list[float]:
    """Losses of the probe; answers and ledgers are in the folder."""
    # On two ranks one has a text more than the other.
    probe = ForgettingProbe(["one two", "three four five", "six"], every_n_steps=2, batch_size=2)
    samples = SampleGenerations(["Hello", "What is"], every_n_steps=2, max_new_tokens=4)
    module = CausalLM(model_folder, peft=LoraConfig(r=2, target_modules="all-linear", init_lora_weights=True))
    module.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    options = {} if strategy is None else {"devices": 2, "strategy": STRATEGIES[strategy]()}
    trainer = make_trainer(
        max_steps=4,
        default_root_dir=folder,
        callbacks=[probe, samples, SpikeGuard(), LossLedger()],
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, TextDataModule(data, micro_batch_size=1 if strategy else 2, max_length=96))
    return [line["loss"] for line in probe._measured]


@pytest.fixture(scope="module")
def measured_alone(
    tmp_path_factory: pytest.TempPathFactory, model_folder: str
) -> Callable[[Any], tuple[str, Path, list[float]]]:
    """Function that measures in one process, once; returns the file of rows, the folder and the losses of the probe."""
    folder = tmp_path_factory.mktemp("alone")
    done: list[list[float]] = []

    def measure(make_trainer: Any) -> tuple[str, Path, list[float]]:
        data = folder / "rows.json"
        if not done:
            data.write_text(json.dumps(make_rows(22), ensure_ascii=False), encoding="utf-8")
            done.append(all_of_them(make_trainer, model_folder, str(data), str(folder / "one"), None))
        return str(data), folder / "one", done[0]

    return measure


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_answers_and_measures_as_one_process_does(
    make_trainer: Any, model_folder: str, measured_alone: Any, tmp_path: Path, strategy: str
) -> None:
    data, one, alone = measured_alone(make_trainer)
    two = tmp_path / "two"
    ranks = on_ranks(2, all_of_them, make_trainer, model_folder, data, str(two), strategy, timeout=100)
    assert len(alone) == 3
    for losses in ranks:
        assert losses == pytest.approx(alone, rel=1e-4)
    answers = [read_lines(folder / "samples.jsonl") for folder in (one, two)]
    assert answers[0] == answers[1]
    assert [line["step"] for line in answers[0]] == [0, 0, 2, 2, 4, 4]
    ledgers = [sorted(read_visits(folder / "loss_ledger")) for folder in (one, two)]
    assert [visit[:4] for visit in ledgers[0]] == [visit[:4] for visit in ledgers[1]]
    assert [visit.loss for visit in ledgers[0]] == pytest.approx([visit.loss for visit in ledgers[1]], rel=1e-4)


def diverge(make_trainer: Any, model_folder: str, data: str, folder: str) -> tuple[int, list[str]]:
    module = CausalLM(model_folder, peft=LoraConfig(r=2, target_modules="all-linear"))
    module.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e30)
    guard = SpikeGuard(warmup_steps=2, stop_after=2)
    options = {"devices": 2, "strategy": DeepSpeedStrategy(stage=2), "default_root_dir": folder}
    trainer = make_trainer(max_steps=9, callbacks=[guard], use_distributed_sampler=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(SpikesPersist, match="2 of the last . steps"):
            trainer.fit(module, TextDataModule(data, max_length=96))
    return guard.skipped_steps, [str(warning.message) for warning in caught]


@pytest.mark.processes
def test_under_deepspeed_the_guard_can_stop_but_not_skip_and_says_so(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    ranks = on_ranks(2, diverge, make_trainer, model_folder, write_rows(), str(tmp_path), timeout=120)
    assert [found for found, _ in ranks] == [2, 2]
    said = [line for line in ranks[0][1] if "loss is nan" in line]
    assert "The step is taken all the same: DeepSpeed keeps gradients to itself" in said[0]


@pytest.mark.parametrize(
    ("offers", "protocol"),
    [
        (CausalLM, protocols.AnswersPrompts),
        (CausalLM, protocols.RendersPrompts),
        (CausalLM, protocols.MeasuresTextLoss),
        (CausalLM, protocols.MeasuresGradientNorm),
        (CausalLM, protocols.SavesAdapter),
        (TextDataModule, protocols.LooksUpTexts),
        (ModelParallelStrategy, protocols.GathersWeights),
        (ModelParallelStrategy, protocols.SumsGradientNorm),
        (ModelParallelStrategy, protocols.WritesModelFolder),
    ],
)
def test_lit_ft_offers_what_callbacks_ask_for(offers: type, protocol: type) -> None:
    assert issubclass(offers, protocol)


def test_the_module_holds_a_tokenizer_and_records_losses(model_folder: str) -> None:
    module = CausalLM(model_folder)
    assert isinstance(module, protocols.HoldsTokenizer)
    assert isinstance(module, protocols.RecordsLosses)
