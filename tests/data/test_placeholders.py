"""Placeholders that were left in text, and braces that are none."""

import pytest

from lit_ft.data.text.placeholders import placeholder_in


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("I am {{name}}, made by {{author}}.", "{{name}}"),
        ("Hello {{ user_name }}!", "{{ user_name }}"),
        ("你好，{{名字}}。", "{{名字}}"),
        ("Dear {name}, welcome", "{name}"),
        ("no braces", None),
        ("a set {1, 2} and {x}", None),
        (r"\frac{alpha}{beta} and x^{max} and a_{ij}", None),
        ("echo ${HOME}", None),
        ('print(f"Hello {name}")', None),
        ("```\n{{name}}\n```", None),
        ("int main() {\n return 0; }", None),
        ('{"name": "look"}', None),
    ],
)
def test_placeholders(text: str, found: str | None) -> None:
    assert placeholder_in(text) == found
