"""Answers of several ranks are one file in the order of the rows; no file is overwritten."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from ranks import on_ranks
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer

from lit_ft import RecipeError
from lit_ft.protocols import Question
from lit_ft.run import predictions


def gathered(shares: list[list[int]]) -> list[Any]:
    dist.init_process_group("gloo")
    return predictions.gather([{"row": row, "answer": str(row)} for row in shares[dist.get_rank()]])


@pytest.mark.processes
@pytest.mark.parametrize("shares", [[[0, 2, 4], [1, 3]], [[0, 1, 2, 3, 4]] * 2], ids=["rows", "split model"])
def test_ranks(shares: list[list[int]]) -> None:
    assert on_ranks(2, gathered, shares) == [[{"answer": str(row)} for row in range(5)], []]


def test_answers_of_other_modules_stay_as_they_are() -> None:
    assert predictions.gather([[1.5], "text"]) == [[1.5], "text"]


def test_paths(tmp_path: Path) -> None:
    for name in ("predictions.jsonl", "predictions-2.jsonl", "predictions-3.jsonl"):
        path = predictions.free_path(tmp_path, None)
        assert path.name == name
        predictions.write(path, [{"answer": "书"}])
    assert json.loads(path.read_text(encoding="utf-8")) == {"answer": "书"}
    with pytest.raises(RecipeError, match="exists, and is not overwritten"):
        predictions.free_path(tmp_path, str(path))


@pytest.mark.parametrize(
    ("path", "problem"),
    [(__file__, "was written by another process meanwhile"), ("/proc/a.jsonl", "cannot be written")],
)
def test_answers_that_cannot_be_written_are_kept(
    path: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RecipeError, match=rf"^{path} {problem}.*; the answers are in {tmp_path}/") as refused:
        predictions.write(Path(path), [{"answer": "书"}])
    kept = Path(str(refused.value).rpartition(" ")[2])
    assert kept.read_text(encoding="utf-8") == '{"answer": "书"}\n'


def _as_it_is(batch: object) -> object:
    return batch


class Answers(LightningModule):
    """Gives each batch as its answers, if it is no exception."""

    def predict_step(self, batch: object, batch_idx: int, dataloader_idx: int = 0) -> object:
        if isinstance(batch, BaseException):
            raise batch
        return batch


def predict(path: Path, *loaders: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[predictions.AnswerFile(path)],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.predict(Answers(), [DataLoader(batches, batch_size=None, collate_fn=_as_it_is) for batches in loaders])


def test_answers_of_a_run_that_fails_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = predictions.free_path(tmp_path, None)
    with pytest.raises(RuntimeError, match="out of memory"):
        predict(path, [[{"row": 3}, {"row": 1}], [{"row": 2}], RuntimeError("out of memory")])
    kept = tmp_path / "predictions.jsonl.rank0.partial"
    assert [json.loads(line)["row"] for line in kept.read_text().splitlines()] == [3, 1, 2]
    assert f"answers until then: 3 in {kept}" in capsys.readouterr().err
    assert predictions.free_path(tmp_path, None).name == "predictions-2.jsonl"
    with pytest.raises(RecipeError, match=f"{kept} exists, and is not overwritten"):
        predictions.free_path(tmp_path, str(path))


def test_answers_of_a_run_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    predict(path, [["a", "b"], None, "one"], [{"answer": "c"}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == ["a", "b", "one", {"answer": "c"}]
    assert [*tmp_path.iterdir()] == [path]


def test_a_full_disk_leaves_nothing_behind_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "predictions.jsonl"
    monkeypatch.setattr(predictions, "_append", fail)
    with pytest.warns(UserWarning, match="No space left on device.: answers are in memory until the end"):
        predict(path, [["a"], ["b"]])
    assert path.read_text().splitlines() == ['"a"', '"b"']
    assert [*tmp_path.iterdir()] == [path]


def test_answers_that_json_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Tensor is not JSON serializable: answers are written as JSON; let predict"):
        predict(tmp_path / "predictions.jsonl", [torch.ones(2)])
    assert not [*tmp_path.iterdir()]


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    (tmp_path / "predictions.jsonl.rank0.partial").write_text("of another process")
    with pytest.warns(UserWarning, match="cannot be written .*: answers are in memory until the end"):
        predict(path, [["a"]])
    assert path.read_text() == '"a"\n'
    assert len([*tmp_path.iterdir()]) == 2


def test_prompts_beyond_the_positions_of_a_model(model_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(model_folder), AutoConfig.for_model("qwen2")
    config.max_position_embeddings = 40
    lengths = {"short": 3, "long": 30, "longer": 41}
    questions = [Question(row=0, id=id, question="", prompt="a" * n, expected=None) for id, n in lengths.items()]
    tokens = [len(tokenizer(question["prompt"])["input_ids"]) for question in questions]
    assert tokens == [*lengths.values()], "a token a letter"
    with caplog.at_level("INFO", "lightning.pytorch"):
        predictions.check_prompts(questions[:2], tokenizer, config, 10, "it")
        predictions.check_prompts(questions[:2], tokenizer, config, 11, "it")
    assert caplog.messages == ["1 of 2 prompts leave less than max_new_tokens=11 of the 40 positions of it"]
    beyond = r"the prompt of longer of 41 tokens is beyond the 40 positions of it; scale .*, or leave the row out"
    with pytest.warns(UserWarning, match=f"^1 of 3 prompts too long: {beyond}"):
        predictions.check_prompts(questions, tokenizer, config, 1, "it")
    with pytest.warns(UserWarning, match="^1 of 2 prompts too long: .* long of 30 tokens and 11 virtual tokens is"):
        predictions.check_prompts(questions[:2], tokenizer, config, 1, "it", virtual_tokens=11)
    learned = AutoConfig.for_model("gpt2", n_positions=40)
    with pytest.raises(RecipeError, match="of 41 tokens is beyond the 40 positions of it; leave the row out"):
        predictions.check_prompts(questions, tokenizer, learned, 1, "it")
