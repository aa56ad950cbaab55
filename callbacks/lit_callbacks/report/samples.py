"""Answers of ``SampleGenerations``, by prompt."""

from collections.abc import Sequence
from typing import NamedTuple

from lit_callbacks.output.chat_text import Part, Turn, split_turns
from lit_callbacks.report.report_data import Json


class PromptAnswers(NamedTuple):
    """Answers to one prompt, each with its optimizer step."""

    turns: list[Turn]
    """The prompt."""
    expected: str | None
    ends: list[tuple[int, str]]
    """The first and the last answer, which may be one."""
    between: list[tuple[int, str]]


def by_prompt(lines: Sequence[Json]) -> list[PromptAnswers]:
    """Answers of each prompt, in the order of the prompts."""
    of_prompts: dict[str, list[Json]] = {}
    for line in lines:
        of_prompts.setdefault(line["prompt"], []).append(line)
    return [_answers(prompt, members) for prompt, members in of_prompts.items()]


def _answers(prompt: str, lines: list[Json]) -> PromptAnswers:
    answers = [(line["step"], line["answer"]) for line in lines]
    turns = [[Part("user\n", "role"), Part(prompt)]] if lines[0].get("chat") else split_turns(prompt)
    ends = answers[:: len(answers) - 1] if len(answers) > 1 else answers
    return PromptAnswers(turns, lines[0].get("expected"), ends, answers[1:-1])
