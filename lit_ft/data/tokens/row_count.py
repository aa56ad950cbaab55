"""Count of the rows that are tokenized: on a terminal at once, elsewhere a line every 30 s."""

import sys
import time
from types import TracebackType

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.output.quantities import as_count
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lit_ft.internals.lightning import rank

SECONDS_BETWEEN_LINES = 30


class RowCount:
    """Context that shows how many rows of a source are done."""

    def __init__(self, path: str) -> None:
        self.path, self.rows = path, 0
        self._said_at = time.monotonic()
        self._is_shown = sys.stderr.isatty() and rank() == 0
        # No thread that refreshes it: the processes that tokenize are forks.
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self._is_shown,
        )
        self._task = self._bar.add_task(f"tokenizing {path}")

    def __enter__(self) -> "RowCount":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def add(self, rows: int) -> None:
        """Count rows that are done."""
        self.rows += rows
        text = f"tokenizing {self.path}: {as_count(self.rows, 'row')}"
        self._bar.update(self._task, description=text, refresh=True)
        if not self._is_shown and time.monotonic() - self._said_at >= SECONDS_BETWEEN_LINES:
            self._said_at = time.monotonic()
            rank_zero_info(text)
