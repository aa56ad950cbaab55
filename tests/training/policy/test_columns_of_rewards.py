"""Rewards that read columns of the data: each answer comes with those of the row that asks for it."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from compared_strategies import sgd
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sampled_answers import FewLetters, data_of

from lit_ft import CausalLM, PolicyLM, RecipeError, Source, TextDataModule
from lit_ft.training.policy.rewards import Reward, SampledAnswer


class Weighted(Reward):
    """Share of the commonest letter, times a column; and a record of what it has seen."""

    columns = ("factor", "tests")

    def __init__(self) -> None:
        self.seen: list[tuple[str, object, object]] = []

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        self.seen += [(one.expected, one.columns["factor"], one.columns["tests"]) for one in answers]
        given = zip(answers, FewLetters().of(answers), strict=True)
        return [float(str(one.columns["factor"] or 0)) * value for one, value in given]


ROWS: list[dict[str, Any]] = [
    {"instruction": "Which?", "output": "this", "factor": 1, "tests": [{"in": 1}, {"in": [2]}]},
    {"instruction": "Which?", "output": "this", "factor": 3, "tests": []},  # the same question and answer
    {"instruction": "And now?", "output": "that", "factor": 0.5},
    {"instruction": "Why?", "output": "so", "tests": ["a"]},
]


def _file(folder: Path, rows: list[dict[str, Any]] = ROWS, name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return str(folder / name)


def _module(folder: str, *rewards: Reward) -> PolicyLM:
    return PolicyLM(folder, rewards=list(rewards), answers_per_prompt=2, max_new_tokens=2, optimizer=sgd)


def test_answers_come_with_the_columns_of_their_rows(make_trainer: Any, model_folder: str, tmp_path: Path) -> None:
    """In training, where a step's answers are given at its first micro-batch, and in validation."""
    path, reward = _file(tmp_path), Weighted()
    data = data_of(path, val_path=path, micro_batch_size=2)
    make_trainer(max_epochs=1, accumulate_grad_batches=2).fit(_module(model_folder, reward), data)
    rows = [(row["output"], row.get("factor"), row.get("tests")) for row in ROWS]
    key = repr  # of what has no order
    count = len(reward.seen)
    assert sorted(set(map(key, reward.seen))) == sorted(map(key, rows))
    in_training = reward.seen[count - 8 - 4 : count - 4]  # after the trial; then comes the validation
    assert sorted(map(key, in_training)) == sorted(map(key, rows + rows))
    assert sorted(map(key, reward.seen[-4:])) == sorted(map(key, rows))


def test_a_split_of_the_rows_and_of_the_step_changes_nothing(
    make_trainer: Any, model_folder: str, tmp_path: Path
) -> None:
    path, found = _file(tmp_path), []
    for micro_batch_size, accumulate in ((4, 1), (1, 4)):
        module = _module(model_folder, Weighted())
        trainer = make_trainer(max_epochs=1, accumulate_grad_batches=accumulate)
        trainer.fit(module, data_of(path, val_path=path, micro_batch_size=micro_batch_size))
        found.append([float(trainer.callback_metrics[name]) for name in ("train/loss", "train/reward", "val/reward")])
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-7)
    assert found[0][1] > 0


def test_a_fraction_of_the_rows_keeps_their_columns(make_trainer: Any, model_folder: str, tmp_path: Path) -> None:
    other = _file(tmp_path, [{"instruction": "Who?", "output": "she", "factor": 9, "tests": 1}] * 2, "other.jsonl")
    sources, reward = [Source(_file(tmp_path)), Source(other, max_rows=1)], Weighted()
    data = TextDataModule(sources=sources[:1], val_sources=sources[1:], micro_batch_size=4)
    make_trainer(max_epochs=1).validate(_module(model_folder, reward), data, verbose=False)
    assert reward.seen == [("she", 9, 1)]
    reward.seen.clear()
    held_out = TextDataModule(_file(tmp_path), val_fraction=0.3, micro_batch_size=4)
    make_trainer(max_epochs=1).validate(_module(model_folder, reward), held_out, verbose=False)
    assert [one for one, *_ in reward.seen] in (["that"], ["so"], ["this", "this"])


class ReadsLevel(FewLetters):
    columns = ("tests", "level")


class ReadsText(FewLetters):
    columns = "tests"


def test_what_has_no_columns_is_refused(make_trainer: Any, model_folder: str, tmp_path: Path) -> None:
    path = _file(tmp_path)
    with pytest.raises(RecipeError, match="ReadsLevel reads the column 'level', which no row of the data of train"):
        make_trainer(max_epochs=1).fit(_module(model_folder, ReadsLevel()), data_of(path, val_path=None))
    stream = data_of(path, val_path=None, streaming=True, overlong="drop")
    with pytest.raises(RecipeError, match=r"Weighted reads the column 'factor', and data.streaming=true gives tokens"):
        make_trainer(max_steps=1).fit(_module(model_folder, Weighted()), stream)
    with pytest.raises(RecipeError, match=r"ReadsText.columns='tests' must list names of columns"):
        _module(model_folder, ReadsText())
    data = data_of(path, val_path=None)
    data.load((module := _module(model_folder, Weighted())).tokenizer)
    data.trainer = make_trainer(max_epochs=1)
    with pytest.raises(RecipeError, match="Weighted reads the column 'factor', and the data module gives none"):
        module.rewards_of_known(data)  # as one of its own does, whose batches have no columns


def test_columns_are_in_no_line_of_the_answers(make_trainer: Any, model_folder: str, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(max_epochs=1, default_root_dir=tmp_path, logger=logger, log_every_n_steps=1)
    trainer.fit(_module(model_folder, Weighted()), data_of(_file(tmp_path), val_path=None, micro_batch_size=4))
    lines = [json.loads(line) for line in (tmp_path / "sampled_answers.jsonl").read_text("utf-8").splitlines()]
    assert "expected" in lines[0]
    assert "columns" not in lines[0]


def test_columns_are_named_as_unseen_by_the_model(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = data_of(_file(tmp_path), val_path=None)
    data.load(_module(model_folder, Weighted()).tokenizer)
    assert "columns that the model does not see: 'factor' (in 3 rows), 'tests' (in 2 rows)" in caplog.text


QUESTIONS: dict[str, list[dict[str, Any]]] = {
    "alpaca": [{"instruction": f"Which {n}?"} for n in range(4)],
    "messages": [{"messages": [{"role": "user", "content": f"Which {n}?"}]} for n in range(4)],
    "prompts alone, as TRL has them": [
        {"prompt": [{"role": "user", "content": f"Which {n}?"}], "tests": [n]} for n in range(4)
    ],
    "texts": [{"prompt": f"Which {n} is it?"} for n in range(4)],
    "empty answers": [{"prompt": f"Which {n} is it?", "completion": ""} for n in range(4)],
}


class Length(Reward):
    """Reward that reads no known answer, and keeps what it has seen of them."""

    reads_expected = False

    def __init__(self) -> None:
        self.expected: list[str] = []

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        self.expected += [one.expected for one in answers]
        return [len(one.answer) / 100 for one in answers]


@pytest.mark.parametrize("rows", QUESTIONS.values(), ids=QUESTIONS)
def test_rows_may_be_without_an_answer_that_no_reward_reads(
    make_trainer: Any, model_folder: str, tmp_path: Path, rows: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """A validation then has rewards alone."""
    caplog.set_level(logging.INFO)
    path, reward = _file(tmp_path, rows), Length()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(_module(model_folder, reward), data_of(path, val_path=path))
    assert set(reward.expected) == {""}
    assert "4 of 4 rows: without a known answer, and none is needed; '?' stands in its place" in caplog.text
    assert trainer.callback_metrics["val/reward"] > 0
    assert not {"val/loss", "val/perplexity", "val/token_accuracy"} & trainer.callback_metrics.keys()


@pytest.mark.parametrize("callback", [EarlyStopping("val/loss"), ModelCheckpoint(monitor="val/token_accuracy")])
def test_what_waits_for_known_answers_is_refused(
    make_trainer: Any, model_folder: str, tmp_path: Path, callback: Callback
) -> None:
    module, path = _module(model_folder, Length()), _file(tmp_path, QUESTIONS["alpaca"])
    with pytest.raises(RecipeError, match=r"monitors val/.* and no row of the validation data has a known answer"):
        make_trainer(enable_checkpointing=True, callbacks=[callback]).fit(module, data_of(path, val_path=path))
    assert module.model is None, "before weights are read"


def test_one_data_module_serves_modules_that_read_other_things(
    make_trainer: Any, model_folder: str, tmp_path: Path
) -> None:
    """Nothing trains on the sign that stands for a missing answer."""
    data, reward = data_of(_file(tmp_path, QUESTIONS["alpaca"] + ROWS), val_path=None), Length()
    make_trainer(max_epochs=1).fit(_module(model_folder, reward), data)
    assert {"", "this", "that", "so"} == set(reward.expected)
    for module in (CausalLM(model_folder), _module(model_folder, FewLetters())):
        with pytest.raises(RecipeError, match="has no 'output'; each row needs it"):
            make_trainer(max_epochs=1).fit(module, data)
    data, reward = data_of(_file(tmp_path), val_path=None), Weighted()
    make_trainer(max_epochs=1).fit(_module(model_folder, FewLetters()), data)
    make_trainer(max_epochs=1).fit(_module(model_folder, reward), data)
    assert len(reward.seen) > len(ROWS)


def test_a_reward_that_reads_known_answers_wants_them(make_trainer: Any, model_folder: str, tmp_path: Path) -> None:
    data = data_of(_file(tmp_path, QUESTIONS["alpaca"]), val_path=None)
    with pytest.raises(RecipeError, match="has no 'output'; each row needs it"):
        make_trainer(max_epochs=1).fit(_module(model_folder, Length(), FewLetters()), data)


def test_the_loss_is_that_of_known_answers(make_trainer: Any, model_folder: str, tmp_path: Path) -> None:
    """Questions without an answer beside them change nothing, in one batch and in several."""
    known, found = ROWS[2:], []
    for name, rows, size in (("all", [*QUESTIONS["alpaca"], *known], 1), ("some", known, 4), ("both", ROWS[2:], 1)):
        module, path = _module(model_folder, Length()), _file(tmp_path, rows, f"{name}.jsonl")
        trainer = make_trainer(max_epochs=1)
        trainer.validate(module, data_of(path, val_path=path, micro_batch_size=size), verbose=False)
        found.append([float(trainer.callback_metrics[f"val/{one}"]) for one in ("loss", "token_accuracy")])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[1] == pytest.approx(found[2], rel=1e-5)
