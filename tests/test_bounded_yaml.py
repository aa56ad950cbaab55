"""YAML that stands for more than it holds."""

import json
import time
from pathlib import Path

import pytest
import yaml

from lit_ft import RecipeError
from lit_ft.bounded_yaml import MOST_VALUES, load_yaml

LISTS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60))
DEEP = "[" * 100_000

TOO_MUCH = {
    "nested references": (LISTS, "over 100,000 values"),
    "merged references": (MERGES, "over 100,000 values"),
    "a reference to itself": ("a: &a [*a]", "refers to itself"),
    "long": ("[" + "0," * MOST_VALUES + "]", "over 100,000 values"),
    "deep": (DEEP + "]" * len(DEEP), "over 100 deep"),
    "deep and broken": (DEEP, "over 100 deep"),
    "deep within a string": (f"a: {json.dumps(DEEP)}", "over 100 deep"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_at_once(name: str) -> None:
    text, message = TOO_MUCH[name]
    started = time.perf_counter()
    with pytest.raises(RecipeError, match=message):
        load_yaml(text)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("text", ["a: &a {b: 1}\nc: {<<: *a, d: *a}", "", "x: " + "long " * 1000, "[[]]", "a: |\n  b"])
def test_ordinary_documents_are_read_as_ever(text: str) -> None:
    assert load_yaml(text) == yaml.safe_load(text)


def test_what_is_no_yaml_stays_a_yaml_error() -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml("a: [unclosed")


def test_recipes_of_the_repository_are_far_within_the_limits() -> None:
    recipes = list((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))
    assert len(recipes) > 10
    for recipe in recipes:
        load_yaml(recipe.read_text(encoding="utf-8"))
