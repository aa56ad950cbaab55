"""What a batch says of the samples that it holds."""

from collections.abc import Mapping
from typing import Any

ID_KEYS = ("sample_ids", "ids", "id", "index")
"""Where a batch that is a mapping may say which samples it holds."""
SOURCE_KEYS = ("sample_sources", "sources", "source")
"""Where it may say which source each of them is of."""


def batch_ids(batch: Any) -> Any:
    """One id a sample, a list or tensor: the batch's first entry of ``ID_KEYS``; None where it has none."""
    return _first(batch, ID_KEYS)


def batch_sources(batch: Any) -> Any:
    """One source a sample: the batch's first entry of ``SOURCE_KEYS``; None where it has none."""
    return _first(batch, SOURCE_KEYS)


def _first(batch: Any, keys: tuple[str, ...]) -> Any:
    if not isinstance(batch, Mapping):
        return None
    return next((batch[key] for key in keys if key in batch), None)
