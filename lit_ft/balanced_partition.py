"""Costs in a row, cut into parts of about the same cost: layers into stages, samples into micro-batches."""

from collections.abc import Sequence

import numpy as np


def cut_evenly(costs: Sequence[float], parts: int) -> list[range]:
    """Neighbors together, the dearest part as cheap as possible, no part empty.

    Args:
        costs: of each item, at least 0.
        parts: at most as many as items.

    Raises:
        ValueError: there are fewer items than parts.
    """
    if len(costs) < parts:
        raise ValueError(f"{len(costs)} items cannot make {parts} parts; ask for at most as many")
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    # The dearest part is the sum of some neighbors, so halving ends at it; 60 halvings reach float64's precision.
    low, high = max(float(max(costs)), sums[-1] / parts), float(sums[-1])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _ends(sums, parts, middle)[-1] == len(costs) else (middle, high)
    ends = _ends(sums, parts, high)
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _ends(sums: np.ndarray, parts: int, limit: float) -> list[int]:
    """Where parts end that are filled up to a limit, each leaving an item for every part after it."""
    items, ends = len(sums) - 1, [0]
    for part in range(parts):
        fits = int(np.searchsorted(sums, sums[ends[-1]] + limit * (1 + 1e-12), side="right")) - 1
        ends.append(min(max(fits, ends[-1] + 1), items - (parts - part - 1)))
    return ends[1:]
