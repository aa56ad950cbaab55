"""Write docs/python.ipynb from docs/python.md: a cell for each block of code, and one for the text between two.

python -m benchmarks.notebook
"""

import json
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
_FENCED = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_FOLDER = "# The folder of the repository, where the data and the model of this page are.\n%cd -q .."


def blocks(text: str) -> list[str]:
    """Blocks of Python code of a Markdown page."""
    return [match[1].rstrip() for match in _FENCED.finditer(text)]


def notebook(text: str) -> str:
    """Notebook (nbformat 4.5) of a Markdown page, as JSON."""
    parts = _FENCED.split(text)  # text and code in turn
    cells = [("code" if i % 2 else "markdown", part.strip()) for i, part in enumerate(parts)]
    cells = [cells[0], ("code", _FOLDER), *cells[1:]]
    content = {
        "cells": [_cell(number, kind, source) for number, (kind, source) in enumerate(cells) if source],
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def _cell(number: int, kind: str, source: str) -> dict[str, object]:
    cell: dict[str, object] = {
        "id": f"cell-{number}",
        "cell_type": kind,
        "metadata": {},
        "source": source.splitlines(keepends=True),
    }
    return {**cell, "outputs": [], "execution_count": None} if kind == "code" else cell


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
