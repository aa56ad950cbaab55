"""What a ledger of losses says: worst samples, drift, samples that behave as one."""

import math
import statistics
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lit_callbacks.ledger_files import Visit

SLICES = 10
"""Parts of the run, equal in optimiser steps, over which means are taken."""
NEIGHBOURS = 10
"""Samples that each is compared with to find twins, those of the nearest mean."""
MIN_TWIN_VISITS = 2
"""Visits from which a curve is made."""


def summarise(visits: Sequence[Visit], top: int = 20, twin_tolerance: float = 0.1) -> dict[str, Any]:
    """Sum a ledger up.

    Args:
        visits: at least one, by step.
        top: longest list.
        twin_tolerance: how far the losses of twins may be apart (see ``_distance``), as a share of the standard
            deviation of the samples' mean losses.

    Returns:
        ``samples`` and ``visits`` (counts); ``worst``, by last loss, and ``risen``, by last less first loss: lists
        of samples with ``id, source, tokens, visits, first, last``; ``slice_ends``, optimiser steps, and
        ``sources``, each with its token-mean loss in each slice of the run (None where it had none); ``twins``: pairs
        with ``ids, tokens, distance``, the nearest first. Losses are in nats per token.
    """
    by_id: dict[str, list[Visit]] = defaultdict(list)
    for visit in visits:
        by_id[visit.id].append(visit)
    samples = [_sample(members) for members in by_id.values()]
    again = [sample for sample in samples if sample["visits"] > 1 and sample["last"] > sample["first"]]
    # A loss that is not a number is the worst there is.
    worst = sorted(samples, key=lambda s: math.inf if math.isnan(s["last"]) else s["last"], reverse=True)
    steps = visits[-1].step + 1
    return {
        "samples": len(samples),
        "visits": len(visits),
        "worst": worst[:top],
        "risen": sorted(again, key=lambda s: s["first"] - s["last"])[:top],
        "slice_ends": [math.ceil(steps * (i + 1) / SLICES) for i in range(SLICES)],
        "sources": _sources(visits, steps),
        "twins": _twins(by_id, twin_tolerance)[:top],
    }


def _sample(members: Sequence[Visit]) -> dict[str, Any]:
    first, last = members[0], members[-1]
    about = {"id": last.id, "source": last.source, "tokens": last.tokens, "visits": len(members)}
    return {**about, "first": first.loss, "last": last.loss}


def _slice(step: int, steps: int) -> int:
    return step * SLICES // steps


def _sources(visits: Sequence[Visit], steps: int) -> dict[str, list[float | None]]:
    sums: dict[str, list[list[float]]] = defaultdict(lambda: [[0.0, 0] for _ in range(SLICES)])
    for visit in visits:
        cell = sums[visit.source][_slice(visit.step, steps)]
        cell[0] += visit.loss * visit.tokens
        cell[1] += visit.tokens
    return {name: [total / tokens if tokens else None for total, tokens in cells] for name, cells in sums.items()}


def _twins(by_id: dict[str, list[Visit]], tolerance: float) -> list[dict[str, Any]]:
    """Pairs of samples whose losses lie on one curve over the steps of the run."""
    curves = {
        name: members
        for name, members in by_id.items()
        if len(members) >= MIN_TWIN_VISITS and all(math.isfinite(visit.loss) for visit in members)
    }
    means = {name: statistics.fmean(visit.loss for visit in members) for name, members in curves.items()}
    order = sorted(means, key=means.__getitem__)
    limit = tolerance * statistics.pstdev(means.values()) if means else 0.0
    found = []
    for i, name in enumerate(order):
        for other in order[i + 1 : i + 1 + NEIGHBOURS]:
            tokens = [curves[one][0].tokens for one in (name, other)]
            if abs(tokens[0] - tokens[1]) > 0.05 * max(tokens):
                continue
            if (distance := _distance(curves[name], curves[other])) <= limit:
                found.append({"ids": sorted((name, other)), "tokens": max(tokens), "distance": distance})
    return sorted(found, key=lambda pair: pair["distance"])


def _distance(one: Sequence[Visit], other: Sequence[Visit]) -> float:
    """Root mean square, in nats, of what each visit is off the line between the other sample's visits around it."""
    off = [*_off(one, other), *_off(other, one)]
    return math.sqrt(statistics.fmean(gap * gap for gap in off)) if len(off) >= MIN_TWIN_VISITS else math.inf


def _off(visits: Sequence[Visit], curve: Sequence[Visit]) -> list[float]:
    steps, off = [visit.step for visit in curve], []
    for visit in visits:
        k = bisect(steps, visit.step)
        if 0 < k < len(curve):
            before, after = curve[k - 1], curve[k]
            share = (visit.step - before.step) / (after.step - before.step)
            off.append(visit.loss - before.loss - share * (after.loss - before.loss))
    return off
