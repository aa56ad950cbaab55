"""ROUGE and BLEU against the packages that define them, by hand in Chinese, and in the log of a run."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from lit_callbacks.report.report_data import VALIDATION_ANSWERS

from lit_ft import AnswerScores, CausalLM, TextDataModule
from lit_ft.training.answer_scores.rouge_and_bleu import NAMES, bleu_tokenizer, rouge_and_bleu, words

WORDS = "the red book, A cat's 3.5 m-long tail; is (not) blue. Nor_are 12 birds!".split()


def texts(count: int, seed: int) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(1, 30))) for _ in range(count)]


@pytest.mark.slow
def test_english_has_the_figures_of_the_packages_that_define_them() -> None:
    rouge_score, sacrebleu = pytest.importorskip("rouge_score.rouge_scorer"), pytest.importorskip("sacrebleu")
    answers, expected = texts(40, 1), texts(40, 2)
    for number in range(0, 40, 2):  # half of the answers are right up to their last words
        answers[number] = expected[number].rsplit(maxsplit=2)[0]
    scorer = rouge_score.RougeScorer(NAMES[:3])
    by_name: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    for answer, right in zip(answers, expected, strict=True):
        for name, score in scorer.score(right, answer).items():
            by_name[name] += score.fmeasure / len(answers)
    by_name["bleu"] = sacrebleu.corpus_bleu(answers, [expected]).score / 100
    assert rouge_and_bleu(answers, expected) == pytest.approx(by_name, abs=1e-6)
    assert by_name["bleu"] > 0.1


def test_chinese_is_compared_by_characters() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    answers, expected = ["今天天气很好。", "我有 3 本书"], ["今天天气不好。", "我有 3 本书"]
    scores = rouge_and_bleu(answers, expected)
    # Of the first, 5 of 6 characters and 3 of 5 pairs; the second is right.
    assert [scores[name] for name in NAMES[:3]] == pytest.approx([11 / 12, 8 / 10, 11 / 12])
    assert bleu_tokenizer(expected) == "zh"
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(answers, [expected], tokenize="zh").score / 100)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Grüße, café_noir 3.5", ["Grüße", "café", "noir", "3", "5"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("日本のGPU", ["日", "本", "の", "GPU"]),
        ("ภาษาไทย", ["ภ", "า", "ษ", "า", "ไ", "ท", "ย"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("…!", []),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_right_wrong_and_empty_answers() -> None:
    right = "one two three four five"
    assert rouge_and_bleu([right], [right]) == pytest.approx(dict.fromkeys(NAMES, 1.0))
    assert rouge_and_bleu(["", "six"], [right, ""]) == dict.fromkeys(NAMES, 0.0)
    assert bleu_tokenizer([right, "é"]) == "13a"


@pytest.mark.slow
def test_a_run_logs_them_before_and_after(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    rows = [{"instruction": "the red book", "output": "a b c d"}, {"instruction": "a lamp", "output": "一二三四五"}]
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(max_steps=1, callbacks=[AnswerScores(max_new_tokens=4, samples=0)], logger=logger)
    trainer.fit(CausalLM(model_folder), TextDataModule(write_rows(), val_path=write_rows(rows, "val.json")))
    rows = [row for row in csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()) if row["val/rouge1"]]
    assert all(row[f"val/{name}"] for row in rows for name in AnswerScores.names)
    path = Path(trainer.default_root_dir) / VALIDATION_ANSWERS
    answers = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][-2:]
    again = rouge_and_bleu([one["answer"] for one in answers], [one["expected"] for one in answers])
    assert len(rows) == 2
    assert {name: float(rows[-1][f"val/{name}"]) for name in NAMES} == pytest.approx(again)
