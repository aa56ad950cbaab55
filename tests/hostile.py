"""Malicious pickles, which run code when they are loaded."""

import os
from pathlib import Path
from typing import Any


class Evil:
    """Object that leaves a trace if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)
