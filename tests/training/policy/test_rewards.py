"""Rewards: what each gives for which answer, and own ones that fail."""

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lit_ft import ExactAnswer, FinalNumber, Matches, OverlongPenalty, RecipeError, Similarity
from lit_ft.training.answer_scores.rouge_and_bleu import words_and_signs
from lit_ft.training.policy.rewards import Reward, SampledAnswer, rewards_of


def _answers(*pairs: tuple[str, str], tokens: int = 5) -> list[SampledAnswer]:
    return [SampledAnswer("<|user|>How many?", answer, expected, tokens, "stop") for answer, expected in pairs]


def test_exact_answer() -> None:
    assert ExactAnswer().of(_answers(("12", "12"), ("12.", "12"), ("", ""))) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("It is 42.", "6 x 7 = 42\n#### 42", 1),
        ("first 42, then 41", "42", 0),
        ("1,234", "#### 1234", 1),
        ("1,2", "2", 1),  # a list
        ("12,345,678.50", "12345678.5", 1),
        ("-3", "#### -3", 1),
        ("10-5", "5", 1),  # no sign: a number is before it
        ("between 10 and -5", "-5", 1),
        ("\\boxed{7}", "7", 1),
        ("七", "7", 0),
        ("答案是18元。", "#### 18", 1),
        ("", "7", 0),
        ("3.", "3.0", 1),
        (".5", "5", 0),
        (".5", "0.5", 1),
        ("It is -.50.", "-1/2", 1),
        ("so it is right.5", "5", 1),  # a dot that ends a sentence
        ("1e5", "5", 0),
        ("1e5", "#### 100,000", 1),
        ("1.5E-3", "0.0015", 1),
        ("2e", "2", 1),
        ("e5", "5", 1),
        ("7 or 1e999", "7", 1),  # no float
        (f"7 or 1/{'9' * 400}", "7", 1),
        ("1 000", "0", 0),
        ("1 000", "1000", 1),
        ("1\u202f234\u202f567", "1234567", 1),
        ("1'234", "1_234", 1),
        ("In 2019 300 came", "300", 1),
        ("1,234 567", "567", 1),  # of two kinds: two numbers
        ("3/4", "4", 0),
        ("3/4", "0.75", 1),
        ("3/0", "0", 0),
        ("7, version 1.2.3", "3", 0),
        ("7, version 1.2.3", "7", 1),
        ("4 on 5/6/2024", "4", 1),
        ("\u22123", "3", 0),
        ("\u22123", "-3", 1),
        ("１８", "18", 1),
        ("Rs500", "500", 1),
        ("18kg", "18", 1),
        ("50%", "50", 1),
        ("0,5", "5", 1),  # a list as well
        ("2:5", "5", 1),
    ],
)
def test_final_number(answer: str, expected: str, reward: float) -> None:
    assert FinalNumber().of(_answers((answer, expected))) == [reward]


def test_numbers_of_long_answers_are_found_in_linear_time() -> None:
    started = time.perf_counter()
    for part in ("1,234", "1 234 ", "1.", "1/", "1e", "-", "9"):
        FinalNumber().of(_answers((part * 20_000, "7")))
    assert time.perf_counter() - started < 5


def test_final_number_needs_one_in_the_data() -> None:
    with pytest.raises(RecipeError, match="compares numbers, and the data's answer 'seven' has none"):
        rewards_of(FinalNumber(), _answers(("7", "seven")))


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence, by the table of the textbook."""
    row = [0] * (len(other) + 1)
    for part in one:
        before = row
        row = [0]
        for index, other_part in enumerate(other):
            row.append(before[index] + 1 if part == other_part else max(before[index + 1], row[-1]))
    return row[-1]


def test_similarity() -> None:
    assert Similarity().of(_answers(("abcd", "abcd"), ("ab", "abcd"), ("xyz", "abcd"))) == [1, pytest.approx(2 / 3), 0]
    assert Similarity().of(_answers(("", ""), ("", "a"), ("a", ""))) == [1, 0, 0]


def test_similarity_is_that_of_the_longest_common_subsequence() -> None:
    draw = random.Random(0)
    for _ in range(200):
        answer, expected = ("".join(draw.choices("abc 是", k=draw.randint(1, 100))) for _ in range(2))
        wanted = 2 * _longest_common(answer, expected) / (len(answer) + len(expected))
        assert Similarity().of(_answers((answer, expected))) == [wanted]


def test_similarity_to_a_long_answer_is_that_of_words() -> None:
    expected = "The hall is 12 m long, so 是的。" * 4  # 9 words, of which 2 are characters, and 2 signs
    assert len(words_and_signs(expected)) == 4 * 11
    answer = "The  hall\nis 13 m long; so 是的。" * 4
    soup = "e t a o n i s r h l " * 6
    assert Similarity().of(_answers((expected, expected), (answer, expected), (soup, expected))) == [1, 9 / 11, 0]


def test_similarity_takes_no_longer_for_answers_that_repeat_themselves() -> None:
    """difflib took 3 to 9 seconds for one of them."""
    words = random.Random(0).choices("the of and to in a is that for it on with as was 的 一 是 了".split(), k=10_000)
    expected = " ".join(words)
    started = time.perf_counter()
    found = Similarity().of(_answers(*[(answer, expected) for answer in ("the " * 10_000, "的" * 10_000, expected)]))
    assert time.perf_counter() - started < 2
    assert found[2] == 1.0


def test_matches() -> None:
    form = Matches(r"<think>.+</think>\s*\d+")
    assert form.of(_answers(("<think>a\nb</think> 7", ""), ("7", ""), ("<think>a</think> 7 or 8", ""))) == [1, 0, 0]
    with pytest.raises(RecipeError, match=r"pattern='\(' of Matches is no regular expression \(missing \)"):
        Matches("(")


def test_overlong_penalty() -> None:
    found = [OverlongPenalty(10, 20).of(_answers(("", ""), tokens=tokens))[0] for tokens in (1, 10, 15, 20, 30)]
    assert found == [0, 0, -0.5, -1, -1]
    with pytest.raises(RecipeError, match="free_tokens=20 must be below max_tokens=20"):
        OverlongPenalty(20, 20)
    with pytest.raises(RecipeError, match="free_tokens=0 must be 1 or more"):
        OverlongPenalty(0, 20)


class Given(Reward):
    def __init__(self, values: Any) -> None:
        self.values = values

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        if isinstance(self.values, Exception):
            raise self.values
        return self.values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "Given.of gives 1 values for 2 answers; return one for each"),
        ([1.0, float("nan")], "Given.of gives nan for the answer 'b'; return a finite number"),
        ([None, 1.0], "Given.of gives None for the answer 'a'; return a finite number"),
        (["1", 1.0], "Given.of gives '1' for the answer 'a'; return a finite number"),
        ([10**400, 1.0], "for the answer 'a'; return a finite number"),
        ([1.0, 1e39], "Given.of gives 1e+39 for the answer 'b'; return a finite number"),  # infinite in float32
        (torch.zeros(2, 3), "Given.of gives tensor([0., 0., 0.]) for the answer 'a'; return a finite number"),
        (1.0, "model.rewards: TypeError: 'float' object is not iterable; fix Given"),
        (KeyError("x"), "model.rewards: KeyError: 'x'; fix Given"),
    ],
)
def test_own_rewards_that_fail(values: Any, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        rewards_of(Given(values), _answers(("a", ""), ("b", "")))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        [True, False],
        np.array([1, 0], dtype=np.float32),
        [np.int64(1), np.bool_(False)],
        torch.tensor([1.0, 0.0]),
        [torch.tensor(1), torch.tensor(0.0, dtype=torch.bfloat16)],
        map(float, "10"),
    ],
)
def test_numbers_of_own_rewards(values: Any) -> None:
    assert rewards_of(Given(values), _answers(("a", ""), ("b", ""))) == [1.0, 0.0]


class Sorts(Reward):
    def of(self, answers: Any) -> Sequence[float]:
        answers.sort(key=lambda one: one.tokens)
        return [1.0] * len(answers)


def test_a_reward_cannot_reorder_the_answers() -> None:
    with pytest.raises(RecipeError, match=r"AttributeError: 'tuple' object has no attribute 'sort'; fix Sorts"):
        rewards_of(Sorts(), _answers(("a", ""), ("b", "")))
