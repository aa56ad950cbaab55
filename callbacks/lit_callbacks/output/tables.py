"""Tables for the terminal."""

import sys
from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_callbacks.output.printable import printable
from lit_callbacks.output.quantities import as_number


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: with rich if it is installed and stdout is a terminal, else as lines of text through the log.

    Args:
        title: title above the table.
        header: names of the columns.
        rows: cells of each row; floats are shown with four significant digits.
    """
    cells = [[_shown(cell) for cell in row] for row in rows]
    is_number = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    if sys.stdout.isatty() and _show_rich(title, header, cells, is_number):
        return
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        placed = zip(row, widths, is_number, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in placed).rstrip()

    rank_zero_info("\n".join([title, *(f"  {line(row)}" for row in [header, *cells])]))


def _shown(cell: object) -> str:
    return as_number(cell) if isinstance(cell, float) else printable(str(cell), one_line=True)


def _show_rich(title: str, header: Sequence[str], cells: list[list[str]], is_number: list[bool]) -> bool:
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ModuleNotFoundError:
        return False
    table = Table(title=title, title_justify="left")
    for name, right in zip(header, is_number, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(escape, row))
    Console().print(table)
    return True
