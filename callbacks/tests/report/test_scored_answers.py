"""Judged answers: what the report shows of them."""

from pathlib import Path

from lit_callbacks.output.step_lines import read_lines
from lit_callbacks.report.report_data import VALIDATION_ANSWERS
from lit_callbacks.report.scored_answers import MOST_ANSWERS, ScoredAnswer, judge, write_answers


def answers(*texts: str, losses: list[float] | None = None) -> list[ScoredAnswer]:
    """Answers to the questions 0, 1, ..., which are right if they are ``yes``."""
    return [
        ScoredAnswer(str(i), "yes", text, text == "yes", None if losses is None else losses[i])
        for i, text in enumerate(texts)
    ]


def test_the_farthest_from_the_expected_answer_comes_first(tmp_path: Path) -> None:
    write_answers(tmp_path, 0, answers("no", "yes", "no", "no"))
    write_answers(tmp_path, 5, answers("so", "no", "so", "so"))
    write_answers(tmp_path, 9, answers("yes", "ye", "xxx", "yes"))
    judged = judge(read_lines(tmp_path / VALIDATION_ANSWERS))
    assert judged is not None
    assert judged[:5] == (0, 9, 4, 1, 2)
    lists = [
        (part.title, part.total, [(one.question, one.before, one.after) for one in part.answers])
        for part in judged.lists
    ]
    assert lists == [
        ("Wrong", 2, [("2", "no", "xxx"), ("1", "yes", "ye")]),
        ("Right before, wrong now", 1, [("1", "yes", "ye")]),
        ("Right", 2, [("3", "no", "yes"), ("0", "no", "yes")]),
    ]


def test_losses_order_answers_where_they_are_known(tmp_path: Path) -> None:
    write_answers(tmp_path, 3, answers("a", "yes", "b", "yes", losses=[0.5, 2.0, 1.5, 0.1]))
    judged = judge(read_lines(tmp_path / VALIDATION_ANSWERS))
    assert judged is not None
    assert judged[:5] == (3, 3, 4, 2, 2)
    assert [(part.title, [one.question for one in part.answers]) for part in judged.lists] == [
        ("Wrong", ["2", "0"]),
        ("Right", ["3", "1"]),
    ]
    assert {one.before for part in judged.lists for one in part.answers} == {None}


def test_evaluations_of_other_questions_are_not_compared(tmp_path: Path) -> None:
    write_answers(tmp_path, 0, answers("yes"))
    write_answers(tmp_path, 4, answers(*["no"] * (MOST_ANSWERS + 1)))
    judged = judge(read_lines(tmp_path / VALIDATION_ANSWERS))
    assert judged is not None
    assert [(part.title, part.total, len(part.answers)) for part in judged.lists] == [("Wrong", 9, MOST_ANSWERS)]
    assert judged.lists[0].answers[0].before is None
    assert judge([]) is None
