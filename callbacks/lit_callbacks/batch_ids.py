"""Ids and sources of the samples in a batch."""

from collections.abc import Iterable, Mapping

from torch import Tensor

PerSample = Tensor | Iterable[object]
"""One value per sample: a tensor ``(samples,)`` or a list."""
ID_KEYS = ("sample_ids", "ids", "id", "index")
"""Keys under which a batch that is a mapping may hold the ids of its samples, in order of preference."""
SOURCE_KEYS = ("sample_sources", "sources", "source")
"""Keys under which it may hold the source of each sample, in order of preference."""


def batch_ids(batch: object) -> PerSample | None:
    """One id per sample, a list or tensor: the batch's first entry of ``ID_KEYS``; None where it has none."""
    return _first(batch, ID_KEYS)


def batch_sources(batch: object) -> PerSample | None:
    """One source per sample: the batch's first entry of ``SOURCE_KEYS``; None where it has none."""
    return _first(batch, SOURCE_KEYS)


def _first(batch: object, keys: tuple[str, ...]) -> PerSample | None:
    if not isinstance(batch, Mapping):
        return None
    return next((batch[key] for key in keys if key in batch), None)
