"""LossLedger on plain Lightning modules; the summary on visits made by hand."""

import builtins
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lit_callbacks import LossLedger
from lit_callbacks.loss_ledger.ledger_files import Visit, Visits, read_visits, write_part
from lit_callbacks.loss_ledger.ledger_summary import summarize
from lit_callbacks.report.run_report import write_report
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


class Steps(LightningModule):
    """The loss of a sample is its value, plus a weight that moves by 1 each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        losses = batch["value"].float() + self.weight
        return {"loss": losses.mean(), "sample_losses": losses}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class TokenSteps(Steps):
    """Two tokens a sample, one of which does not count in the first sample."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        losses = torch.stack([batch["value"].float(), 3 * batch["value"].float()], 1) + self.weight
        mask = torch.ones_like(losses, dtype=torch.bool)
        mask[0, 1] = False
        return {"loss": losses.mean(), "token_losses": losses, "token_mask": mask}


class HookSteps(Steps):
    """Hands its losses over itself, in manual optimization."""

    def __init__(self, per_token: bool = False) -> None:
        super().__init__()
        self.automatic_optimization, self.per_token = False, per_token
        self.record_losses: Any = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)["sample_losses"]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss.mean())
        optimizer.step()
        if self.per_token:  # three tokens of the first sample, none of the second
            self.record_losses(batch["id"], loss[0] + torch.tensor([-1.0, 0.0, 4.0]), tokens=[3, 0], per_token=True)
        else:
            self.record_losses(batch["id"], loss, tokens=[7] * len(loss))


def rows(values: list[float], **more: list[Any]) -> DataLoader:
    columns = {"value": values, "id": list(range(len(values))), **more}
    return DataLoader(
        [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], batch_size=2
    )


def fit(folder: Path, module: LightningModule, data: DataLoader, ledger: LossLedger, **options: Any) -> Trainer:
    run = Trainer(**{**QUIET, "max_epochs": 2, "default_root_dir": folder, "callbacks": [ledger], **options})
    run.fit(module, data)
    return run


def test_each_visit_of_each_sample_is_kept(tmp_path: Path) -> None:
    fit(tmp_path, Steps(), rows([5.0, 6.0, 7.0, 8.0], source=["a", "b", "a", "b"]), LossLedger(write_every_n_steps=3))
    assert read_visits(tmp_path / "loss_ledger") == [
        Visit(step, epoch, str(2 * (step % 2) + k), "ab"[k], 5.0 + 2 * (step % 2) + k - step, 1)
        for step, epoch in ((0, 0), (1, 0), (2, 1), (3, 1))
        for k in (0, 1)
    ]
    names = sorted(path.name for path in (tmp_path / "loss_ledger").iterdir())
    assert names == ["from00000000-to00000003.rank0.parquet", "from00000000-to00000004.rank0.parquet", "summary.json"]


def test_token_losses_are_averaged_over_the_tokens_that_count(tmp_path: Path) -> None:
    fit(tmp_path, TokenSteps(), rows([5.0, 6.0]), LossLedger(), max_epochs=1)
    assert read_visits(tmp_path / "loss_ledger") == [Visit(0, 0, "0", "", 5.0, 1), Visit(0, 0, "1", "", 12.0, 2)]


def test_losses_of_padding_do_not_count_whatever_they_are(tmp_path: Path) -> None:
    class Padded(TokenSteps):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            outputs["token_losses"] = outputs["token_losses"].where(outputs["token_mask"], math.nan)
            return outputs

    fit(tmp_path, Padded(), rows([5.0, 6.0]), LossLedger(), max_epochs=1)
    assert [(visit.loss, visit.tokens) for visit in read_visits(tmp_path / "loss_ledger")] == [(5.0, 1), (12.0, 2)]


def test_token_losses_in_bf16_are_averaged_in_fp32(tmp_path: Path) -> None:
    class Bf16Steps(Steps):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            return {"loss": outputs["loss"], "token_losses": torch.tensor([[1000.0, 1.0, 3.0]], dtype=torch.bfloat16)}

    fit(tmp_path, Bf16Steps(), rows([5.0]), LossLedger(), max_epochs=1)
    (visit,) = read_visits(tmp_path / "loss_ledger")
    assert visit.loss == pytest.approx(1004 / 3)  # 334 in bf16


def test_a_recorded_step_reads_nothing_from_the_device() -> None:
    ledger = LossLedger()
    on_device: dict[str, Any] = {"device": "meta"}  # reading one of its tensors raises an error
    ids, losses = torch.arange(2, **on_device), torch.zeros(2, **on_device)
    ledger.record(ids, losses, tokens=torch.ones(2, **on_device), sources=ids)
    assert len(ledger._pending) == 1


def test_after_an_error_the_module_no_longer_holds_the_ledger(tmp_path: Path) -> None:
    class Failing(HookSteps):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ArithmeticError

    module = Failing()
    with pytest.raises(ArithmeticError):
        fit(tmp_path, module, rows([5.0, 6.0]), LossLedger())
    assert module.record_losses is None


class Lost(torch.Tensor):
    """Losses on a device that has failed: each call raises, as after an assertion on CUDA."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_losses_that_cannot_be_read_after_an_error_do_not_hide_it(tmp_path: Path) -> None:
    class Failing(HookSteps):
        def on_train_batch_end(self, *_: Any) -> None:
            self.record_losses.__self__._pending[0].losses.__class__ = Lost
            raise ArithmeticError

    told: list[str] = []
    last = LambdaCallback(on_exception=lambda _, __, error: told.append(type(error).__name__))
    ledger = LossLedger()
    warned = pytest.warns(UserWarning, match="LossLedger: cannot keep the last losses .RuntimeError: CUDA error")
    with warned, pytest.raises(ArithmeticError):
        fit(tmp_path, Failing(), rows([5.0, 6.0]), ledger, callbacks=[ledger, last])
    assert told == ["ArithmeticError"]


def test_a_module_that_calls_record_itself(tmp_path: Path) -> None:
    module = HookSteps()
    fit(tmp_path, module, rows([5.0, 6.0]), LossLedger(), max_epochs=1)
    assert read_visits(tmp_path / "loss_ledger") == [Visit(0, 0, "0", "", 5.0, 7), Visit(0, 0, "1", "", 6.0, 7)]
    assert module.record_losses is None


def test_a_module_that_records_what_its_tokens_cost(tmp_path: Path) -> None:
    fit(tmp_path, HookSteps(per_token=True), rows([5.0, 6.0]), LossLedger(), max_epochs=1)
    assert read_visits(tmp_path / "loss_ledger") == [Visit(0, 0, "0", "", 6.0, 3)]


def test_losses_of_many_tokens_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_callbacks.loss_ledger.loss_ledger.TOKENS_KEPT", 2)
    ledger = LossLedger()
    ledger.record(["a", "b"], torch.tensor([1.0, 2.0, 6.0]), [3, 0], per_token=True)
    assert ledger._pending[0][4].tolist() == [3.0, 0.0]
    fit(tmp_path, HookSteps(per_token=True), rows([5.0, 6.0]), LossLedger(), max_epochs=1)
    assert read_visits(tmp_path / "loss_ledger") == [Visit(0, 0, "0", "", 6.0, 3)]


def hide_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ModuleNotFoundError(name, name="pyarrow")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)


def test_csv_where_there_is_no_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_pyarrow(monkeypatch)
    fit(tmp_path, Steps(), rows([5.0, math.nan]), LossLedger(), max_epochs=1)
    assert (tmp_path / "loss_ledger" / "from00000000-to00000001.rank0.csv").exists()
    first, second = read_visits(tmp_path / "loss_ledger")
    assert first == Visit(0, 0, "0", "", 5.0, 1)
    assert math.isnan(second.loss)


def test_losses_that_are_not_finite_are_null_in_the_summary_and_named_in_the_report(tmp_path: Path) -> None:
    fit(tmp_path, Steps(), rows([5.0, math.nan, math.inf]), LossLedger(), max_epochs=1)
    text = (tmp_path / "loss_ledger" / "summary.json").read_text()
    summary = json.loads(text, parse_constant=pytest.fail)
    assert [one["last"] for one in summary["worst"]] == [None, None, 5.0]
    assert summary["sources"] == {"": [None] * 10}
    write_report(tmp_path)
    assert "not finite" in (tmp_path / "report.html").read_text()


def test_a_resumed_run_without_the_pyarrow_of_its_first_part_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fit(tmp_path, Steps(), rows([5.0, 6.0]), LossLedger(), max_epochs=1)
    run.save_checkpoint(tmp_path / "one.ckpt")
    hide_pyarrow(monkeypatch)
    again = Trainer(**QUIET, max_epochs=2, default_root_dir=tmp_path, callbacks=[LossLedger()])
    with pytest.warns(UserWarning, match="no summary: pyarrow is missing"):
        again.fit(Steps(), rows([5.0, 6.0]), ckpt_path=tmp_path / "one.ckpt")
    assert len(list((tmp_path / "loss_ledger").glob("from*"))) == 2


def test_a_run_forgets_the_ranks_that_an_earlier_one_had(tmp_path: Path) -> None:
    folder = tmp_path / "loss_ledger"
    for rank in (0, 1, 3):
        write_part(folder, 0, rank, Visits([0], [0], [f"earlier-{rank}"], [""], [1.0], [1]))
    fit(tmp_path, Steps(), rows([5.0, 6.0]), LossLedger(), max_epochs=1)
    assert [visit.id for visit in read_visits(folder)] == ["0", "1"]


@pytest.mark.parametrize("has_pyarrow", [True, False])
def test_a_write_that_was_killed_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_pyarrow: bool
) -> None:
    if not has_pyarrow:
        hide_pyarrow(monkeypatch)
    visits = Visits([0], [0], ["a"], [""], [1.0], [1])
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            write_part(tmp_path, 0, 0, visits)
    assert read_visits(tmp_path) == []
    path = write_part(tmp_path, 0, 0, visits)
    assert list(tmp_path.iterdir()) == [path]
    assert [visit.id for visit in read_visits(tmp_path)] == ["a"]


def test_a_resumed_run_takes_back_what_it_does_again(tmp_path: Path) -> None:
    """Three epochs, then again from the end of the first: epochs two and three count once, as done last."""
    data = rows([5.0, 6.0])
    run = fit(tmp_path, Steps(), data, LossLedger(), max_epochs=1)
    run.save_checkpoint(tmp_path / "one.ckpt")
    for end in (3, 2):
        again = Trainer(**QUIET, max_epochs=end, default_root_dir=tmp_path, callbacks=[LossLedger()])
        again.fit(Steps(), data, ckpt_path=tmp_path / "one.ckpt")
    assert [(visit.step, visit.id) for visit in read_visits(tmp_path / "loss_ledger")] == [
        (0, "0"),
        (0, "1"),
        (1, "0"),
        (1, "1"),
    ]


def test_the_summary_by_hand() -> None:
    visits = [
        Visit(0, 0, "falls", "a", 4.0, 10),
        Visit(1, 0, "rises", "b", 1.0, 30),
        Visit(8, 1, "falls", "a", 2.0, 10),
        Visit(9, 1, "rises", "b", 3.0, 30),
        Visit(9, 1, "once", "a", 2.5, 10),
    ]
    summary = summarize(visits, top=2)
    assert (summary["samples"], summary["visits"]) == (3, 5)
    assert [sample["id"] for sample in summary["worst"]] == ["rises", "once"]
    assert [sample["id"] for sample in summary["best"]] == ["falls", "once"]
    assert summary["unit"] == "nats per token"
    assert summary["risen"] == [{"id": "rises", "source": "b", "tokens": 30, "visits": 2, "first": 1.0, "last": 3.0}]
    assert summary["slice_ends"] == list(range(1, 11))
    assert summary["sources"]["b"] == [None, 1.0, *[None] * 7, 3.0]
    assert summary["sources"]["a"] == [4.0, *[None] * 7, 2.0, 2.5]


def test_a_loss_that_is_not_a_number_is_the_worst() -> None:
    visits = [Visit(0, 0, "high", "", 9.0, 1), Visit(0, 0, "broken", "", math.nan, 1)]
    assert [sample["id"] for sample in summarize(visits)["worst"]] == ["broken", "high"]


class Classifier(LightningModule):
    """Learns random labels by heart: what it makes of a sample depends on the sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        losses = nn.functional.cross_entropy(self.layers(batch["x"]), batch["y"], reduction="none")
        return {"loss": losses.mean(), "sample_losses": losses}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def test_near_duplicates_are_found_by_how_their_losses_go(tmp_path: Path) -> None:
    """Three of 64 samples come again, a little changed, in other batches."""
    torch.manual_seed(0)
    xs, ys = torch.randn(64, 16), torch.randint(0, 10, (64,))
    pairs = [(5, 64), (20, 65), (41, 66)]
    data: list[Any] = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(zip(xs, ys, strict=True))]
    data += [{"x": xs[i] + 0.01 * torch.randn(16), "y": ys[i], "id": j} for i, j in pairs]
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
    fit(tmp_path, Classifier(), loader, LossLedger(), max_epochs=16)
    twins = json.loads((tmp_path / "loss_ledger" / "summary.json").read_text())["twins"]
    assert {tuple(map(int, pair["ids"])) for pair in twins} == set(pairs)


@pytest.mark.parametrize("epochs", [2, 3, 6])
def test_losses_that_are_near_by_chance_are_no_duplicates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, epochs: int
) -> None:
    """Losses of 300 samples, drawn anew at each visit."""

    class Drawn(Steps):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            losses = 2.5 + 0.6 * torch.randn(len(batch["id"])) + 0 * self.weight
            return {"loss": losses.mean(), "sample_losses": losses}

    torch.manual_seed(0)
    caplog.set_level("INFO", "lightning.pytorch")
    fit(tmp_path, Drawn(), rows([0.0] * 300), LossLedger(), max_epochs=epochs)
    assert summarize(read_visits(tmp_path / "loss_ledger"))["twins"] or epochs == 6  # which have like losses
    assert json.loads((tmp_path / "loss_ledger" / "summary.json").read_text())["twins"] == []
    assert "likely duplicates" not in caplog.text


def test_duplicates_that_are_not_listed_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    ledger = LossLedger(top=1, texts=lambda ids: dict.fromkeys(ids, "the same text"))
    fit(tmp_path, Steps(), rows([5.0] * 4 + [9.0, 7.0]), ledger, max_epochs=3)
    assert len(json.loads((tmp_path / "loss_ledger" / "summary.json").read_text())["twins"]) == 1
    assert "these are the nearest 1 of 2 pairs; top= lists more" in caplog.text


def test_a_module_that_gives_no_losses_is_a_warning(tmp_path: Path) -> None:
    class Silent(Steps):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"]

    with pytest.warns(UserWarning, match="Silent.training_step returns neither 'sample_losses' nor 'token_losses'"):
        assert fit(tmp_path, Silent(), rows([5.0]), LossLedger()).global_step == 2
    assert not (tmp_path / "loss_ledger").exists()


def test_an_empty_first_micro_batch_is_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    class FirstIsEmpty(Steps):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            return outputs if batch_idx % 2 else outputs["loss"] * 0

    fit(tmp_path, FirstIsEmpty(), rows([1.0, 2.0, 3.0, 4.0]), LossLedger(), accumulate_grad_batches=2)
    assert not [warning for warning in recwarn if "LossLedger" in str(warning.message)]


def test_samples_without_ids_are_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="cannot tell samples apart: the dict has no 'sample_ids'"):
        assert fit(tmp_path, Steps(), DataLoader([{"value": 1.0}]), LossLedger()).global_step == 2


def test_lengths_that_differ_are_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="got 1 ids, 2 losses, 1 token counts and 1 sources, and leaves them out"):
        LossLedger().record(["a"], torch.ones(2))
    with pytest.warns(UserWarning, match=r"2 losses, 1 token counts .* with per_token=True 3 losses: the sum"):
        LossLedger().record(["a"], torch.ones(2), [3], per_token=True)


def test_shapes_and_functions_that_are_wrong_are_warnings(tmp_path: Path) -> None:
    class Flat(Steps):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            losses = super().training_step(batch, batch_idx)["sample_losses"]
            return {"loss": losses.mean(), "token_losses": losses.detach()}

    with pytest.warns(UserWarning, match=r"LossLedger: cannot keep a step's losses \(IndexError.*\(samples, tokens\)"):
        assert fit(tmp_path, Flat(), rows([5.0, 6.0]), LossLedger()).global_step == 2
    with pytest.warns(UserWarning, match=r"LossLedger: cannot keep a step's losses \(KeyError: 'name'\)"):
        run = fit(tmp_path, Steps(), rows([5.0, 6.0]), LossLedger(ids=lambda batch: batch["name"]))
    assert run.global_step == 2
    assert not (tmp_path / "loss_ledger").exists()


def test_a_column_of_losses_is_as_good_as_a_row(tmp_path: Path) -> None:
    class Column(Steps):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            returned = super().training_step(batch, batch_idx)
            return {**returned, "sample_losses": returned["sample_losses"][:, None]}

    fit(tmp_path, Column(), rows([5.0, 6.0]), LossLedger(), max_epochs=1)
    assert [visit.loss for visit in read_visits(tmp_path / "loss_ledger")] == [5.0, 6.0]


def test_an_unwritable_folder_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"LossLedger cannot write, .*; give folder= \("):
        assert fit(tmp_path, Steps(), rows([5.0]), LossLedger(tmp_path / "file" / "x")).global_step == 2


def test_the_table_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    ledger = LossLedger(texts=lambda ids: {name: f"[text] of {name} " + "words " * 100 for name in ids})
    fit(tmp_path, Steps(), rows([5.0, 6.5], source=["a", "b"]), ledger, max_epochs=1)
    worst = json.loads((tmp_path / "loss_ledger" / "summary.json").read_text())["worst"]
    assert [len(sample["text"]) for sample in worst] == [500, 500]
    assert (
        "worst of 2 samples, loss in nats\n"
        "  sample  source  tokens  visits  first  last  text\n"
        "  1       b            1       1    6.5   6.5  [text] of 1 words words words words words words words...\n"
        "  0       a            1       1      5     5  [text] of 0 words words words words words words words..."
    ) in caplog.text


def test_texts_tell_duplicates_from_pairs_that_are_near_by_chance(tmp_path: Path) -> None:
    """Six samples have the same loss, two of them at a time the same text."""
    texts = {str(i): f"{'abcdefgh'[i // 2] * 20} {i}" for i in range(8)}
    fit(tmp_path, Steps(), rows([5.0] * 6 + [9.0, 7.0]), LossLedger(texts=lambda ids: texts), max_epochs=3)
    twins = json.loads((tmp_path / "loss_ledger" / "summary.json").read_text())["twins"]
    assert sorted(pair["ids"] for pair in twins) == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert twins[0]["likeness"] == pytest.approx(2 * 21 / (2 * 22))


def test_texts_that_cannot_be_had_are_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"LossLedger: no texts of samples \(ZeroDivisionError"):
        fit(tmp_path, Steps(), rows([5.0]), LossLedger(texts=lambda ids: 1 / 0))
    assert (tmp_path / "loss_ledger" / "summary.json").exists()


def test_texts_of_other_types_are_a_warning_or_left_out(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"LossLedger: no texts of samples \(AttributeError: 'list' object"):
        fit(tmp_path, Steps(), rows([5.0]), LossLedger(texts=lambda ids: list(ids)))  # type: ignore[arg-type, return-value]
    texts: Any = {0: 17, "1": None}
    fit(tmp_path, Steps(), rows([5.0, 4.0]), LossLedger(texts=lambda ids: texts))
    worst = json.loads((tmp_path / "loss_ledger" / "summary.json").read_text())["worst"]
    assert [sample["text"] for sample in worst] == ["17", ""]


def test_samples_whose_texts_are_not_known_are_no_duplicates(tmp_path: Path) -> None:
    texts = {"0": "the same text", "1": "the same text", "2": "another one"}
    fit(tmp_path, Steps(), rows([5.0] * 4 + [9.0, 9.0]), LossLedger(texts=lambda ids: texts), max_epochs=3)
    twins = json.loads((tmp_path / "loss_ledger" / "summary.json").read_text())["twins"]
    assert [pair["ids"] for pair in twins] == [["0", "1"]]


def two_ranks(folder: str) -> None:
    rank = int(os.environ["RANK"])
    data = DataLoader([{"value": 5.0 + rank, "id": f"row {rank}"}])
    fit(Path(folder), Steps(), data, LossLedger(), max_epochs=1, devices=2, strategy="ddp")


@pytest.mark.processes
def test_the_ranks_ledgers_are_summed_up_together(tmp_path: Path) -> None:
    on_ranks(2, two_ranks, str(tmp_path), timeout=120)
    summary = json.loads((tmp_path / "loss_ledger" / "summary.json").read_text())
    assert [(sample["id"], sample["last"]) for sample in summary["worst"]] == [("row 1", 6.0), ("row 0", 5.0)]


def test_each_fit_warns_once_and_not_in_each_step(tmp_path: Path) -> None:
    """Also where a library resets Python's memory of warnings."""
    callback = LossLedger(tmp_path)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run = Trainer(**QUIET, max_epochs=1, callbacks=[callback])
            run.fit(Steps(), DataLoader([{"value": float(i)} for i in range(4)]))
        assert [str(one.message) for one in seen if "samples apart" in str(one.message)] == [
            "LossLedger: cannot tell samples apart: the dict has no 'sample_ids', so their losses are not kept; add "
            "them to the batch, or pass ids=<function from batch to list>"
        ]
