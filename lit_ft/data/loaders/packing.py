"""Packing: assignment of samples to bins of a fixed token budget."""

from heapq import heappop, heappush

import numpy as np


def best_fit(lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Best-fit bin packing (Johnson 1973): each sample into the fullest bin that has room.

    Samples over a quarter of the budget come first, by decreasing length, for a tight fit. The others
    keep the given order: if they were sorted too, each bin would hold samples of one length, which are
    often of one kind, and the gradient of a step would come from that kind only.

    Args:
        lengths: tokens per sample, ``(samples,)``, in the order in which they are drawn; none may be over ``budget``.
        budget: tokens per bin.

    Returns:
        Bins, each a list of indices into ``lengths``.
    """
    is_long = lengths > budget // 4
    longest_first = np.flatnonzero(is_long)[np.argsort(-lengths[is_long], kind="stable")]
    order = np.concatenate([longest_first, np.flatnonzero(~is_long)])
    bins: list[list[int]] = []
    # Bins by the tokens that are free in them, and one number whose bit n says that a bin with n free tokens exists:
    # the fullest bin that fits a sample is the lowest bit from its length on.
    by_room: list[list[int]] = [[] for _ in range(budget + 1)]
    rooms = 0
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            which = heappop(by_room[room])
            if not by_room[room]:
                rooms ^= 1 << room
            bins[which].append(sample)
        else:
            room, which = budget, len(bins)
            bins.append([sample])
        left = room - length
        heappush(by_room[left], which)
        rooms |= 1 << left
    return bins
