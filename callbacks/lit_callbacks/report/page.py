"""The pages of this project: one style, no script, no other file, light and dark, for screens and phones."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader  # torch brings it

from lit_callbacks.output.chat_text import split_turns


def render_page(template: Path, title: str, **values: object) -> str:
    """Render a page, with all values escaped.

    Args:
        template: Jinja template that extends ``page.html.j2``, the frame and style of all pages.
        title: title of the page.
        values: values for the template.
    """
    folders = [template.parent, Path(__file__).parent]
    environment = Environment(loader=FileSystemLoader(folders), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": _number, "turns": split_turns}
    return environment.get_template(template.name).render(title=title, **values)


def _number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)
