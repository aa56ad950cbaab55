"""Tables of docs/methods.md and docs/optimizers.md, from the tables by which lit_ft refuses.

python -m benchmarks.support_tables            # writes them into the docs
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from lit_ft.training.optimizers import compatibility as optimizers
from lit_ft.tuning import bottleneck  # noqa: F401 (PEFT knows its method once it is imported)
from lit_ft.tuning import compatibility as methods

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- printed by python -m benchmarks.support_tables -->\n", "<!-- end -->"


def headings(row: Any) -> dict[str, str]:
    """Heading of each situation of a table, from one of its rows."""
    return {part.name: part.metadata["heading"] for part in fields(row) if "heading" in part.metadata}


def markdown(head: str, rows: Mapping[str, Any]) -> str:
    """Table of yes and no, with the numbers of the reasons, which are listed below it.

    Args:
        head: heading of the first column.
        rows: rows of the table by their labels.
    """
    columns = headings(next(iter(rows.values())))
    numbers: dict[str, int] = {}

    def cell(row: Any, name: str) -> str:
        if name != "packed" and getattr(row, "packed", None) is not None:
            return ""  # it does not train at all
        if (only := getattr(row, "only", ())) and name not in only:
            return ""
        reason = getattr(row, name)
        return "yes" if reason is None else f"no ({numbers.setdefault(reason, len(numbers) + 1)})"

    lines = [f"| {head} | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {label} | {' | '.join(cell(row, name) for name in columns)} |" for label, row in rows.items()]
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in numbers.items()), ""])


def method_label(row: methods.MethodSupport) -> str:
    """Method with its config class, or option with the values that the row is about."""
    if row.name in PEFT_TYPE_TO_CONFIG_MAPPING:
        return f"`{PEFT_TYPE_TO_CONFIG_MAPPING[row.name].__name__}`"
    return f"`{row.name}`" + (f": {', '.join(row.values)}" if row.values else "")


def tables() -> dict[Path, str]:
    """Printed table by the file that holds it."""
    of_methods = {method_label(row): row for row in methods.METHODS}
    of_optimizers = {f"`{row.name}`": row for row in optimizers.OPTIMIZERS}
    return {
        DOCS / "methods.md": markdown("config, or option of one", of_methods | {"any other": methods.NOT_LISTED}),
        DOCS / "optimizers.md": markdown("class, or option", of_optimizers | {"any other": optimizers.NOT_LISTED}),
    }


def with_table(text: str, table: str, begin: str = BEGIN) -> str:
    """A file's text with its table, which starts after the line ``begin``, replaced."""
    before, _, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table}\n{end}{after}"


if __name__ == "__main__":
    for path, table in tables().items():
        path.write_text(with_table(path.read_text(encoding="utf-8"), table), encoding="utf-8")
