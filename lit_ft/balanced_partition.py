"""Balanced partition of a sequence into contiguous parts: layers into pipeline stages, samples into micro-batches."""

from collections.abc import Sequence

import numpy as np


def split_evenly(costs: Sequence[float], parts: int) -> list[range]:
    """Partition items into contiguous, non-empty parts so that the largest cost of a part is minimal.

    Args:
        costs: cost of each item, at least 0.
        parts: number of parts, at most the number of items.

    Raises:
        ValueError: there are fewer items than parts.
    """
    if len(costs) < parts:
        raise ValueError(f"{len(costs)} items cannot make {parts} parts; ask for at most as many")
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    # Bisection over the largest cost of a part; 60 steps reach float64's precision.
    low, high = max(float(max(costs)), sums[-1] / parts), float(sums[-1])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _ends(sums, parts, middle)[-1] == len(costs) else (middle, high)
    ends = _ends(sums, parts, high)
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _ends(sums: np.ndarray, parts: int, limit: float) -> list[int]:
    """End indices of parts that are filled up to a cost limit; each leaves one item for every later part."""
    items, ends = len(sums) - 1, [0]
    for part in range(parts):
        fits = int(np.searchsorted(sums, sums[ends[-1]] + limit * (1 + 1e-12), side="right")) - 1
        ends.append(min(max(fits, ends[-1] + 1), items - (parts - part - 1)))
    return ends[1:]
