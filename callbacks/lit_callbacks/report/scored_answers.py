"""A model's answers to held-out questions, each judged, in ``validation_answers.jsonl``; the report shows some of them.

Any callback or module may write them. A run that resumes drops the lines after its checkpoint with ``drop_after_step``.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal, NamedTuple

from lit_callbacks.output.step_lines import add_lines
from lit_callbacks.report.report_data import VALIDATION_ANSWERS, Json

MOST_ANSWERS = 8
"""Maximum number of answers in each list of the report."""
LONGEST_COMPARED = 2000
"""Maximum number of characters of two texts that are compared to find the answers farthest from the expected ones."""


@dataclass(frozen=True)
class ScoredAnswer:
    """Answer to a held-out question.

    Args:
        question: text of the question, or the full prompt.
        expected: expected answer.
        answer: the model's answer.
        is_right: whether it counts as right.
        loss: mean loss of the expected answer, in nats per token; None where it was not computed.
        finish_reason: what ended the answer: ``stop`` (the model) or ``length`` (a limit); None where it is not known.
    """

    question: str
    expected: str
    answer: str
    is_right: bool
    loss: float | None = None
    finish_reason: Literal["stop", "length"] | None = None


def write_answers(folder: str | Path, step: int, answers: Sequence[ScoredAnswer]) -> None:
    """Append the answers of one evaluation to a run's file.

    Args:
        folder: folder of the run.
        step: optimizer steps before the evaluation.
        answers: answers, in the same order each time.

    Raises:
        OSError: the folder cannot be written.
    """
    add_lines(Path(folder) / VALIDATION_ANSWERS, [{"step": step, **asdict(answer)} for answer in answers])


class ComparedAnswer(NamedTuple):
    """Answers to one question in the first and the last evaluation."""

    question: str
    expected: str
    before: str | None
    """Answer of the first evaluation; None where there was one evaluation, or one of other questions."""
    after: str
    loss: float | None
    likeness: float
    """Likeness of the last answer to the expected one, 0 to 1."""
    was_right: bool | None
    is_right: bool


class AnswerList(NamedTuple):
    """Part of the answers."""

    title: str
    total: int
    """Number of answers in this part, of which ``answers`` has the first."""
    answers: list[ComparedAnswer]


class Judged(NamedTuple):
    """Answers of a run's first and last evaluation."""

    first_step: int
    last_step: int
    total: int
    right_before: int
    right_after: int
    lists: list[AnswerList]


def judge(lines: Sequence[Json]) -> Judged | None:
    """Best and worst answers of the last evaluation, beside those of the first; None where there are none.

    They are in order of their losses where all have one, else those farthest from the expected answer come first.
    """
    if not lines:
        return None
    first, last = ([line for line in lines if line["step"] == lines[at]["step"]] for at in (0, -1))
    steps = first[0]["step"], last[0]["step"]
    is_same = steps[0] != steps[1] and [one["question"] for one in first] == [one["question"] for one in last]
    answers = [_compared(first[number] if is_same else None, after) for number, after in enumerate(last)]
    if all(answer.loss is not None for answer in answers):
        ordered = sorted(answers, key=lambda answer: -(answer.loss or 0.0))
    else:
        ordered = sorted(answers, key=lambda answer: answer.likeness)
    lists = [_list(title, members) for title, members in _parts(ordered) if members]
    return Judged(*steps, len(last), _right(first), _right(last), lists)


def _right(lines: Sequence[Json]) -> int:
    return sum(bool(line["is_right"]) for line in lines)


def _compared(before: Json | None, after: Json) -> ComparedAnswer:
    expected, answer = (str(after[key])[:LONGEST_COMPARED] for key in ("expected", "answer"))
    return ComparedAnswer(
        question=str(after["question"]),
        expected=str(after["expected"]),
        before=None if before is None else str(before["answer"]),
        after=str(after["answer"]),
        loss=after.get("loss"),
        likeness=SequenceMatcher(None, expected, answer, autojunk=False).quick_ratio(),
        was_right=None if before is None else bool(before["is_right"]),
        is_right=bool(after["is_right"]),
    )


def _parts(ordered: list[ComparedAnswer]) -> list[tuple[str, list[ComparedAnswer]]]:
    """Parts of the answers by title, from the worst answer to the best."""
    return [
        ("Wrong", [one for one in ordered if not one.is_right]),
        ("Right before, wrong now", [one for one in ordered if one.was_right and not one.is_right]),
        ("Right", [one for one in reversed(ordered) if one.is_right]),
    ]


def _list(title: str, members: list[ComparedAnswer]) -> AnswerList:
    return AnswerList(title, len(members), members[:MOST_ANSWERS])
