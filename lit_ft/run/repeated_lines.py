"""Suppression of lines that the checks before a run print, and the run again when it builds the same model."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class _Repetitions(logging.Filter):
    """Filter that drops a line once for each time that it was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.is_listening = False
        self.said: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is shown."""
        text = record.getMessage()
        if self.is_listening or not self.said[text]:
            self.said[text] += self.is_listening
            return True
        self.said[text] -= 1
        return False


_REPETITIONS = _Repetitions()
_LOGGER = logging.getLogger("lightning.pytorch.utilities.rank_zero")


@contextmanager
def without_repetitions() -> Iterator[None]:
    """Context that records printed lines; the next repetition of each is dropped."""
    _REPETITIONS.said.clear()
    _LOGGER.addFilter(_REPETITIONS)  # has no effect the second time
    _REPETITIONS.is_listening = True
    try:
        yield
    finally:
        _REPETITIONS.is_listening = False
