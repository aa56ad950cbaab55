"""Calls that must not end a run, such as measurements of a callback: their errors become warnings."""

from collections.abc import Callable
from typing import TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_Result = TypeVar("_Result")


class Attempts:
    """Calls of one callback, and its warnings, each printed once."""

    def __init__(self, callback: str) -> None:
        """Start without warnings.

        Args:
            callback: name of the callback, which the warnings begin with.
        """
        self.callback = callback
        self._warned: set[str] = set()

    def result(self, what: str, call: Callable[[], _Result]) -> _Result | None:
        """Result of a call; None and a warning if it raises.

        Args:
            what: text of the warning: what cannot be done.
            call: function without arguments, called once.
        """
        try:
            return call()
        except Exception as error:
            self.warn(f"{what} ({type(error).__name__}: {error})", what)
            return None

    def warn(self, message: str, kind: str = "") -> None:
        """Print a warning on rank 0, unless one of its kind was printed.

        Args:
            message: text of the warning.
            kind: what it is about, where the text has values that change.
        """
        if (kind or message) not in self._warned:
            self._warned.add(kind or message)
            rank_zero_warn(f"{self.callback}: {message}")


def written(what: str, write: Callable[[], object]) -> bool:
    """Whether ``write`` succeeded; an ``OSError`` becomes a warning.

    Args:
        what: text of the warning: what cannot be written and what to do.
        write: function without arguments, called once.
    """
    try:
        write()
    except OSError as error:
        rank_zero_warn(f"{what} ({error})")
        return False
    return True
