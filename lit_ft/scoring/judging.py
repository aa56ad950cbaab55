"""Win rate of one model's answers against another's, by a judge behind OpenAI's HTTP interface.

The two-way comparison of MT-bench (Zheng et al. 2023, arXiv:2306.05685): the judge sees both answers in both orders,
and an answer wins only if it wins in both.
"""

import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev
from typing import Literal

from lit_ft.errors import RecipeError
from lit_ft.inference.openai.client import Lacking, OpenAIClient
from lit_ft.inference.opening import OpenedModel
from lit_ft.model.generation import GeneratedAnswer, generate_answers, prompt_size
from lit_ft.protocols import Question
from lit_ft.scoring.scores import Score

Verdict = Literal["A", "B", "C"]
"""The first answer is better, the second one, or neither."""
Outcome = Literal["win", "loss", "tie", "unread", "not judged"]

SYSTEM = (
    "Please act as an impartial judge and evaluate the quality of the responses provided by two AI assistants to the "
    "user question displayed below. You should choose the assistant that follows the user's instructions and answers "
    "the user's question better. Your evaluation should consider factors such as the helpfulness, relevance, accuracy, "
    "depth, creativity, and level of detail of their responses. Begin your evaluation by comparing the two responses "
    "and provide a short explanation. Avoid any position biases and ensure that the order in which the responses were "
    "presented does not influence your decision. Do not allow the length of the responses to influence your "
    "evaluation. Do not favor certain names of the assistants. Be as objective as possible. After providing your "
    'explanation, output your final verdict by strictly following this format: "[[A]]" if assistant A is better, '
    '"[[B]]" if assistant B is better, and "[[C]]" for a tie.'
)
"""MT-bench's prompt ``pair-v2``."""
PROMPT = (
    "[User Question]\n{question}\n\n[The Start of Assistant A's Answer]\n{answer_a}\n[The End of Assistant A's "
    "Answer]\n\n[The Start of Assistant B's Answer]\n{answer_b}\n[The End of Assistant B's Answer]"
)
_FIELD = re.compile(r"\{(question|answer_a|answer_b|expected)\}")
_VERDICT = re.compile(r"\[\[([ABC])\]\]")


@dataclass(frozen=True)
class Judge:
    """Model that compares two answers."""

    client: OpenAIClient
    model: str
    prompt: str = PROMPT
    """Text with ``{question}``, ``{answer_a}``, ``{answer_b}`` and perhaps ``{expected}``."""
    system: str | None = SYSTEM
    max_tokens: int = 2048
    at_once: int = 8
    """Requests that are sent at the same time."""

    @classmethod
    def with_prompt(cls, client: OpenAIClient, model: str, file: str | None, at_once: int) -> "Judge":
        """Judge with the prompt of a file, or MT-bench's.

        Raises:
            RecipeError: the file cannot be read, or lacks a field.
        """
        if file is None:
            return cls(client, model, at_once=at_once)
        try:
            text = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"judge_prompt={file!r} cannot be read ({error}); name a text file") from error
        for name in ("question", "answer_a", "answer_b"):
            if f"{{{name}}}" not in text:
                raise RecipeError(f"judge_prompt={file!r} has no {{{name}}}; write it where the judge is to read that")
        return cls(client, model, text, None, at_once=at_once)

    def ask(self, question: str, answer_a: str, answer_b: str, expected: str | None) -> str:
        """The judge's text about two answers.

        Raises:
            RecipeError: the server cannot be reached, or refuses the question.
        """
        fields = {"question": question, "answer_a": answer_a, "answer_b": answer_b, "expected": expected or ""}
        # Not str.format: prompts and answers may have braces of their own.
        text = _FIELD.sub(lambda field: fields[field[1]], self.prompt)
        turns = [{"role": "system", "content": self.system}] if self.system else []
        try:
            return self.client.greedy_chat(self.model, [*turns, {"role": "user", "content": text}], self.max_tokens)
        except Lacking as error:
            raise RecipeError(f"the judge {self.model!r} at {self.client.url} refuses a question: {error}") from error


@dataclass(frozen=True)
class Judgment:
    """Two answers to a question, and what the judge says in both orders."""

    question: str
    answer: str
    base_answer: str
    outcome: Outcome = "not judged"
    said: Sequence[str] = ()
    """The judge's texts: with the answer first, and with the base's first; none for equal answers."""


def verdict_of(text: str) -> Verdict | None:
    """Verdict ``[[A]]``, ``[[B]]`` or ``[[C]]`` in a judge's text; None if there is none, or several that differ."""
    verdicts = set(_VERDICT.findall(text))
    return verdicts.pop() if len(verdicts) == 1 else None


def outcome_of(first: Verdict | None, swapped: Verdict | None) -> Outcome:
    """Outcome of two orders: the answer is A in the first and B in the second; a win or loss needs both."""
    if first is None or swapped is None:
        return "unread"
    if (first, swapped) == ("A", "B"):
        return "win"
    return "loss" if (first, swapped) == ("B", "A") else "tie"


def compare(questions: Sequence[Question], unjudged: Sequence[Judgment], judge: Judge) -> Iterator[Judgment]:
    """Judge pairs of answers, in their order; equal answers are ties that the judge does not see."""

    def judged(question: Question, pair: Judgment) -> Judgment:
        own, other = pair.answer, pair.base_answer
        if own.strip() == other.strip():
            return replace(pair, outcome="tie")
        texts = [judge.ask(pair.question, one, two, question["expected"]) for one, two in ((own, other), (other, own))]
        first, swapped = map(verdict_of, texts)
        return replace(pair, outcome=outcome_of(first, swapped), said=texts)

    with ThreadPoolExecutor(judge.at_once) as pool:
        yield from pool.map(judged, questions, unjudged)


def answers_of(
    opened: OpenedModel, questions: Sequence[Question], max_new_tokens: int, batch_size: int
) -> list[GeneratedAnswer]:
    """Greedy answers to questions."""
    prompts = [question["prompt"] for question in questions]
    by_size = sorted(range(len(prompts)), key=lambda row: prompt_size(prompts[row]), reverse=True)
    answers: dict[int, GeneratedAnswer] = {}
    for start in range(0, len(prompts), batch_size):
        rows = by_size[start : start + batch_size]
        batch = [prompts[row] for row in rows]
        replies = generate_answers(opened.model, opened.base, opened.tokenizer, batch, max_new_tokens)
        answers |= dict(zip(rows, replies, strict=True))
    return [answers[row] for row in range(len(prompts))]


def win_rates(name: str, judgments: Sequence[Judgment]) -> tuple[list[Score], list[Score], str]:
    """Win rates of a model and of its base, and a sentence on what they count; a tie is half a win.

    Args:
        name: name of the questions.
        judgments: judgments, of which those without a verdict are left out.

    Raises:
        RecipeError: the judge gave no verdict at all.
    """
    counts = {outcome: sum(one.outcome == outcome for one in judgments) for outcome in ("win", "loss", "tie", "unread")}
    points = [{"win": 1.0, "tie": 0.5, "loss": 0.0}[one.outcome] for one in judgments if one.outcome != "unread"]
    if not points:
        text = next(one.said for one in judgments)[0][:200]
        raise RecipeError(
            f"the judge gave no verdict [[A]], [[B]] or [[C]] in any of {len(judgments):,} comparisons (it said "
            f"{text!r}); take another judge, or a judge_prompt that asks for them"
        )
    rate = sum(points) / len(points)
    error = stdev(points) / math.sqrt(len(points)) if len(points) > 1 else None
    equal = sum(one.outcome == "tie" and not one.said for one in judgments)
    note = (
        f"{name}: {counts['win']:,} wins, {counts['loss']:,} losses, {counts['tie']:,} ties of {len(judgments):,} "
        f"({equal:,} with equal answers, which the judge did not see; other ties include verdicts that changed with "
        "the order)"
    )
    if counts["unread"]:
        note += f"; {counts['unread']:,} without a verdict that could be read were left out"
    metric = "win rate"
    return [Score(name, metric, rate, error)], [Score(name, metric, 1 - rate, error)], note
