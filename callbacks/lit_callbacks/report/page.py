"""The pages of this project: one style, no script, no other file, light and dark, for screens and phones."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader  # torch brings it

from lit_callbacks.output.chat_text import split_turns
from lit_callbacks.output.quantities import as_number


def render_page(template: Path, title: str, **values: object) -> str:
    """Render a page, with all values escaped.

    Args:
        template: Jinja template that extends ``page.html.j2``, the frame and style of all pages.
        title: title of the page.
        values: values for the template.
    """
    return _environment(template.parent).get_template(template.name).render(title=title, **values)


@cache
def _environment(folder: Path) -> Environment:
    """Templates of a folder, each compiled once."""
    loader = FileSystemLoader([folder, Path(__file__).parent])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": _number, "turns": split_turns}
    return environment


def _number(value: object) -> str:
    return as_number(value) if isinstance(value, float) else "" if value is None else str(value)
