"""What a ledger of losses says: worst samples, drift, samples that behave as one."""

import math
import statistics
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lit_callbacks.loss_ledger.ledger_files import Visit

SLICES = 10
"""Parts of the run, equal in optimizer steps, over which means are taken."""
MOST_COMPARISONS = 200_000
"""Pairs of samples that are compared to find twins: a second or two."""
CANDIDATES = 10
"""Times ``top``: pairs that are kept for a look at their texts."""
MIN_TWIN_VISITS = 2
"""Visits from which a curve is made."""


def summarize(visits: Sequence[Visit], top: int = 20, twin_tolerance: float = 0.1) -> dict[str, Any]:
    """Sum a ledger up.

    Args:
        visits: at least one, by step.
        top: longest list.
        twin_tolerance: how far the losses of twins may be apart (see ``_distance``), as a share of the standard
            deviation of the samples' median losses.

    Returns:
        ``samples`` and ``visits`` (counts); ``worst``, by last loss, and ``risen``, by last less first loss: lists
        of samples with ``id, source, tokens, visits, first, last``; ``slice_ends``, optimizer steps, and
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
        "twins": _twins(by_id, twin_tolerance)[: CANDIDATES * top],
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
    medians = {name: statistics.median(visit.loss for visit in members) for name, members in curves.items()}
    limit = tolerance * statistics.pstdev(medians.values()) if medians else 0.0
    # Twins have about as many tokens, and about the same median: the nearest in this order are compared.
    order = sorted(medians, key=lambda name: (_size(curves[name][0].tokens), medians[name]))
    reach = max(3, min(100, MOST_COMPARISONS // max(len(order), 1)))
    found = []
    for i, name in enumerate(order):
        for other in order[i + 1 : i + 1 + reach]:
            tokens = [curves[one][0].tokens for one in (name, other)]
            if _size(tokens[0]) != _size(tokens[1]) or medians[other] - medians[name] > limit:
                break
            distance, level = _distance(curves[name], curves[other])
            if distance <= limit:
                pair = {"ids": sorted((name, other)), "tokens": max(tokens), "distance": distance}
                # Against the loss itself: samples that are known by heart are all near to each other, and to 0.
                found.append((distance / max(level, 1e-12), pair))
    return [pair for _, pair in sorted(found, key=lambda one: one[0])]


def _size(tokens: int) -> int:
    """A number that is the same for numbers of tokens within about 5 %."""
    return round(math.log(max(tokens, 1)) / 0.05)


def _distance(one: Sequence[Visit], other: Sequence[Visit]) -> tuple[float, float]:
    """How far each visit is off the line between the other sample's visits around it, and the loss there.

    Both are medians, in nats: where a curve falls steeply, at first, the line is far from it.
    """
    compared = [*_off(one, other), *_off(other, one)]
    if len(compared) < MIN_TWIN_VISITS:
        return math.inf, 1.0
    gaps, losses = zip(*compared, strict=True)
    return statistics.median(map(abs, gaps)), statistics.median(losses)


def _off(visits: Sequence[Visit], curve: Sequence[Visit]) -> list[tuple[float, float]]:
    steps, off = [visit.step for visit in curve], []
    for visit in visits:
        k = bisect(steps, visit.step)
        if 0 < k < len(curve):
            before, after = curve[k - 1], curve[k]
            share = (visit.step - before.step) / (after.step - before.step)
            off.append((visit.loss - before.loss - share * (after.loss - before.loss), visit.loss))
    return off
