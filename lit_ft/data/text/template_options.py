"""Variables of chat templates that a recipe sets (``data.template_options``), and the date in place of today's."""

import json
import re
from collections.abc import Mapping
from datetime import datetime

from transformers import PreTrainedTokenizerBase

from lit_ft.errors import RecipeError

CLOCK = "strftime_now"
"""Function by which a template gets today's date, as text in a format of ``strftime``; the option with another date."""
_NOW = re.compile(rf"""{CLOCK}\(\s*(['"])(?P<format>.*?)\1\s*\)""")
"""Call with a format that is written out."""
_DATED = re.compile(rf"{{#- {CLOCK}: (?P<day>\d{{4}}-\d\d-\d\d) #}}")
"""Comment in a template that was given a date."""
_OF_ROWS = {"messages", "tools", "add_generation_prompt"}
_DIRECTIVES = [f"%{dash}{letter}" for dash in ("", "-") for letter in "aAwdbBmyYHIMSfpjUWcxXzZuGV"]
_JSON_TYPES = (bool, int, float, str, list, dict, type(None))


def with_defaults(template: str, options: Mapping[str, object]) -> str:
    """Template whose variables have these values where whoever renders it gives none; a date replaces today's."""
    values = dict(options)
    day = day_of(values.pop(CLOCK, None))
    # Python's literals are Jinja's, in llama.cpp too.
    literals = {name: repr(value if isinstance(value, _JSON_TYPES) else str(value)) for name, value in values.items()}
    head = ("" if day is None else _dated(day)) + "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"
        for name, literal in literals.items()
    )
    if template.startswith(head):
        return template
    # The line break that follows a block or a comment is dropped, so that what follows begins a line, as before.
    return f"{head}\n{template if day is None else at_date(template, day)}"


def check_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object]) -> None:
    """Refuse variables that the tokenizer's chat template does not use.

    Raises:
        RecipeError: it does not use one, rows give it, or it has another date than the given one.
    """
    text, template = str(tokenizer.chat_template), f"the chat template of {tokenizer.name_or_path!r}"
    if unknown := [name for name in options if not uses(tokenizer, name)]:
        raise RecipeError(f"data.template_options: {template} uses no {unknown[0]!r}; take it out")
    if taken := [name for name in options if name in _OF_ROWS]:
        raise RecipeError(f"data.template_options: {taken[0]!r} comes from each row; take it out")
    day = day_of(options.get(CLOCK))
    if day is not None and (fixed := _DATED.search(text)) and fixed.group() != _dated(day):
        raise RecipeError(
            f"data.template_options: {CLOCK}={day:%Y-%m-%d}, but {template} was saved with {fixed['day']} in place of "
            "today's date; give that, or the original template with data.chat_template"
        )


def writes_today(template: str) -> bool:
    """Whether a template may write today's date: it was given no other one."""
    return CLOCK in template and _DATED.search(template) is None


def uses(tokenizer: PreTrainedTokenizerBase, variable: str) -> bool:
    """Whether the tokenizer's chat template has a variable of this name."""
    return re.search(rf"\b{re.escape(variable)}\b", str(tokenizer.chat_template)) is not None


def _dated(day: datetime) -> str:
    """Comment that records the date of a template."""
    return f"{{#- {CLOCK}: {day:%Y-%m-%d} #}}"


def at_date(template: str, day: datetime) -> str:
    """Template with a date in place of today."""
    template = _NOW.sub(lambda call: json.dumps(day.strftime(call["format"])), template)
    return _clock(day) + template if re.search(rf"\b{CLOCK}\s*\(", template) else template


def _clock(day: datetime) -> str:
    """Jinja macro that takes the place of today's clock: transformers hands a template plain data only, no function."""
    dates = "".join(f" | replace({one!r}, {json.dumps(day.strftime(one))})" for one in _DIRECTIVES)
    return f"{{%- macro {CLOCK}(format) -%}}{{{{ format{dates} }}}}{{%- endmacro +%}}"


def day_of(value: object) -> datetime | None:
    """Date that ``strftime_now`` of the options names; None where it is not given.

    Raises:
        RecipeError: it is no date.
    """
    try:
        return None if value is None else datetime.fromisoformat(str(value))
    except ValueError as error:
        raise RecipeError(
            f"data.template_options: {CLOCK}={str(value)!r} must be a date, e.g. {datetime.now():%Y-%m-%d}"
        ) from error
