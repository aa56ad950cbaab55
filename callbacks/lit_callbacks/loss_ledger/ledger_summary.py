"""Summary of a loss ledger: worst samples, loss by source over the run, likely duplicates."""

import math
import statistics
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from lit_callbacks.loss_ledger.ledger_files import Visit

SLICES = 10
"""Number of slices of the run, equal in optimizer steps, for which mean losses are computed."""
MOST_COMPARISONS = 200_000
"""Limit of compared pairs of samples in the search for twins: it takes a second or two."""
TWIN_TOLERANCE = 0.1
"""Largest distance between the loss curves of twins (see ``_distance``), in standard deviations of median losses."""
CANDIDATES = 10
"""Pairs that are kept for a comparison of their texts, as a multiple of ``top``."""
MIN_TWIN_VISITS = 2
"""Smallest number of visits for a loss curve."""
MOST_BY_CHANCE = 0.05
"""Largest number of pairs of different samples, expected by chance, that are as near as a pair of likely duplicates."""


class Sample(TypedDict, total=False):
    """Sample in a summary; ``text`` is added later, where texts are known."""

    id: str
    source: str
    tokens: int
    visits: int
    first: float
    """Loss of the first visit, in nats per token."""
    last: float
    text: str


class Twins(TypedDict, total=False):
    """Pair of samples that are likely duplicates; ``text`` and ``likeness`` are added later, where texts are known."""

    ids: list[str]
    tokens: int
    distance: float
    """Distance of the loss curves, in nats."""
    by_chance: float
    """Expected number of pairs that are as near at as many visits by chance."""
    text: str
    likeness: float
    """Similarity of the texts, 0 to 1."""


class Summary(TypedDict):
    """Summary of a ledger, as in ``summary.json``, where a loss that is not finite is null."""

    samples: int
    visits: int
    unit: str
    """Of losses: ``nats per token``; ``nats`` where each is of one term, as those of pairs of answers are."""
    worst: list[Sample]
    best: list[Sample]
    risen: list[Sample]
    slice_ends: list[int]
    sources: dict[str, list[float | None]]
    twins: list[Twins]


def summarize(visits: Sequence[Visit], top: int = 20) -> Summary:
    """Summarize a ledger.

    Args:
        visits: visits in the order of steps; at least one.
        top: maximum length of a list.

    Returns:
        ``samples`` and ``visits`` (counts); ``unit`` of losses; ``worst`` and ``best``, by last loss, and ``risen``, by
        last minus first loss: lists of samples with ``id, source, tokens, visits, first, last``; ``slice_ends``,
        optimizer steps, and ``sources``, each with its token-mean loss in each slice of the run (None where it had
        none); ``twins``: pairs with ``ids, tokens, distance, by_chance``, those that are hardly near by chance before
        others, and of each kind the nearest first.
    """
    by_id: dict[str, list[Visit]] = defaultdict(list)
    for visit in visits:
        by_id[visit.id].append(visit)
    samples = [_sample(members) for members in by_id.values()]
    again = [sample for sample in samples if sample["visits"] > 1 and sample["last"] > sample["first"]]
    # NaN counts as the highest loss.
    worst = sorted(samples, key=lambda s: math.inf if math.isnan(s["last"]) else s["last"], reverse=True)
    steps = visits[-1].step + 1
    return {
        "samples": len(samples),
        "visits": len(visits),
        "unit": "nats" if all(visit.tokens == 1 for visit in visits) else "nats per token",
        "worst": worst[:top],
        "best": worst[: -top - 1 : -1],
        "risen": sorted(again, key=lambda s: s["first"] - s["last"])[:top],
        "slice_ends": [math.ceil(steps * (i + 1) / SLICES) for i in range(SLICES)],
        "sources": _sources(visits, steps),
        "twins": _twins(by_id)[: CANDIDATES * top],
    }


def with_nulls(value: object) -> object:
    """Copy with None for each number that is not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {name: with_nulls(one) for name, one in value.items()}
    if isinstance(value, list):
        return [with_nulls(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sample(members: Sequence[Visit]) -> Sample:
    last = members[-1]
    return Sample(
        id=last.id,
        source=last.source,
        tokens=last.tokens,
        visits=len(members),
        first=members[0].loss,
        last=last.loss,
    )


def _slice(step: int, steps: int) -> int:
    return step * SLICES // steps


def _sources(visits: Sequence[Visit], steps: int) -> dict[str, list[float | None]]:
    sums: dict[str, list[list[float]]] = defaultdict(lambda: [[0.0, 0] for _ in range(SLICES)])
    for visit in visits:
        cell = sums[visit.source][_slice(visit.step, steps)]
        cell[0] += visit.loss * visit.tokens
        cell[1] += visit.tokens
    return {name: [total / tokens if tokens else None for total, tokens in cells] for name, cells in sums.items()}


def _twins(by_id: dict[str, list[Visit]]) -> list[Twins]:
    """Pairs of samples whose losses lie on one curve over the optimizer steps, the nearest first."""
    curves = {
        name: members
        for name, members in by_id.items()
        if len(members) >= MIN_TWIN_VISITS and all(math.isfinite(visit.loss) for visit in members)
    }
    medians = {name: statistics.median(visit.loss for visit in members) for name, members in curves.items()}
    limit = TWIN_TOLERANCE * statistics.pstdev(medians.values()) if medians else 0.0
    # Twins have about the same number of tokens and median loss: only neighbors in this order are compared.
    order = sorted(medians, key=lambda name: (_size(curves[name][0].tokens), medians[name]))
    reach = max(3, min(100, MOST_COMPARISONS // max(len(order), 1)))
    near: list[_Near] = []
    gaps: list[float] = []  # one of each compared pair, relative to the loss: how near samples are at one visit
    for i, name in enumerate(order):
        for other in order[i + 1 : i + 1 + reach]:
            tokens = [curves[one][0].tokens for one in (name, other)]
            if _size(tokens[0]) != _size(tokens[1]) or medians[other] - medians[name] > limit:
                break
            compared = [*_off(curves[name], curves[other]), *_off(curves[other], curves[name])]
            if len(compared) < MIN_TWIN_VISITS:
                continue
            distance, level, relative = _distance(compared)
            gaps.append(relative[len(gaps) % len(relative)])
            if distance <= limit:
                pair = Twins(ids=sorted((name, other)), tokens=max(tokens), distance=distance)
                visits = min(len(curves[name]), len(curves[other]))
                near.append(_Near(pair, distance / level, statistics.median_high(relative), visits))
    return _ranked(near, sorted(gaps))


class _Near(NamedTuple):
    """Pair of samples with near loss curves."""

    pair: Twins
    distance: float
    """Relative to the loss itself: all memorized samples have losses near 0, so near each other."""
    gap: float
    """Upper median of the gaps at the visits, each relative to its loss."""
    visits: int


def _ranked(near: Sequence[_Near], gaps: Sequence[float]) -> list[Twins]:
    """Pairs in the order of the summary, with the number of those that are as near by chance.

    By chance, most visits of a pair have small gaps where each has one independently, as often as compared pairs do.
    Half of the visits count as independent: curves are smooth, and a gap shares its losses with the next one.
    """
    for one in near:
        share = (bisect(gaps, one.gap) + 1) / (len(gaps) + 1)
        one.pair["by_chance"] = len(gaps) * _chance_of_most(one.visits // 2, share)
    near = sorted(near, key=lambda one: (one.pair["by_chance"] > MOST_BY_CHANCE, one.distance))
    return [one.pair for one in near]


def _chance_of_most(count: int, share: float) -> float:
    """Probability that more than half of ``count`` independent events of probability ``share`` happen."""
    return sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count // 2 + 1, count + 1))


def _size(tokens: int) -> int:
    """Bin of a number of tokens; bins are about 5 % wide."""
    return round(math.log(max(tokens, 1)) / 0.05)


def _distance(compared: Sequence[tuple[float, float]]) -> tuple[float, float, list[float]]:
    """Distance of two loss curves from gaps and losses at visits, their loss, and the gaps relative to the losses.

    Distance and loss are medians, in nats: at the steep start of a curve, the interpolation is far from it.
    """
    gaps, losses = zip(*compared, strict=True)
    relative = [abs(gap) / max(abs(loss), 1e-12) for gap, loss in compared]
    return statistics.median(map(abs, gaps)), max(statistics.median(losses), 1e-12), relative


def _off(visits: Sequence[Visit], curve: Sequence[Visit]) -> list[tuple[float, float]]:
    """Gap of each visit from another sample's linearly interpolated loss curve, in nats, and the visit's loss."""
    steps, off = [visit.step for visit in curve], []
    for visit in visits:
        k = bisect(steps, visit.step)
        if 0 < k < len(curve):
            before, after = curve[k - 1], curve[k]
            share = (visit.step - before.step) / (after.step - before.step)
            off.append((visit.loss - before.loss - share * (after.loss - before.loss), visit.loss))
    return off
