"""Assignment of samples to the micro-batches of each data-parallel rank, computed before an epoch starts.

Terms: a *unit* is what ``micro_batch_size`` counts (a sample, or a bin of samples that are packed together); a *window*
is the micro-batches of one optimizer step; a *replica* is a data-parallel rank.

All ranks distribute one global order of units, so that the samples of an optimizer step do not depend on how
the step is split into micro-batches and ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from torch.utils.data import DataLoader, Dataset

from lit_ft.data.loaders.mixing import Mixing
from lit_ft.data.loaders.packing import best_fit
from lit_ft.data.tokens.samples import Samples
from lit_ft.data.worker_processes import batches_of
from lit_ft.errors import RecipeError
from lit_ft.packed_batch import (
    Conversation,
    PackedBatch,
    empty_batch,
    pack_pairs,
    pack_samples,
    sample_targets,
    with_no_pairs,
)
from lit_ft.protocols import LoaderState

_Batch = TypeVar("_Batch")

MicroBatch = list[int]
"""Indices of the samples that are packed together; empty when there is nothing to compute."""
Unit = Sequence[int]
"""Indices of the samples of a unit."""


_BINS: WeakKeyDictionary[Samples, dict[tuple[object, ...], list[Unit]]] = WeakKeyDictionary()
"""Bins by their samples and what they depend on besides: seconds of work for a million samples."""


@dataclass(frozen=True)
class BatchPlan:
    """Rules that distribute samples to micro-batches and ranks."""

    micro_batch_size: int
    """Units per micro-batch and replica."""
    packing: int | None = None
    """Token budget of a bin of samples; None makes each sample a unit of its own."""
    token_budget: int | None = None
    """Tokens up to which micro-batches of one window are joined; None joins none."""
    shuffle: bool = False
    seed: int = 0
    replicas: int = 1
    mixes_bins: bool = False
    """Whether bins are in a random order, the same each epoch, although ``shuffle`` is off; by default those of the
    longest samples come first."""
    mixing: Mixing = field(default_factory=Mixing)
    keeps_beginnings: bool = True
    """Whether samples of one row that begin alike follow one another, so that these tokens are computed once."""
    shows_window: bool = False
    """Whether the first micro-batch of a window also holds the samples of all of them on its rank, or of pairs their
    prompts with answers to others."""

    def units(self, samples: Samples, *numbers: int) -> list[Unit]:
        """Units of an epoch (or of a stream's buffer) in order; ``numbers`` are those of both, part of the seed."""
        if self.packing is None:
            order = self._order(samples, [self.seed, *numbers])
            # Tuples of numbers, which Python's searches for cycles soon leave out; lists they traverse each time.
            return list(zip(order.tolist()))
        units = self._bins(samples, self.packing)
        if not self.shuffle and not self.mixes_bins:
            return units
        seed = [self.seed, *(numbers if self.shuffle else ())]
        return [units[i] for i in np.random.default_rng(seed).permutation(len(units))]

    def _bins(self, samples: Samples, budget: int) -> list[Unit]:
        """Bins of an epoch, the same each time: their number is its length, which the trainer asks for once."""
        kept = _BINS.setdefault(samples, {})
        key = budget, self.mixing, self.shuffle, self.seed
        if key not in kept:
            order = self._order(samples, self.seed)
            alike = samples.of_one_beginning if self.keeps_beginnings else None
            if alike is None:
                kept[key] = [order[members].tolist() for members in best_fit(samples.lengths[order], budget)]
            else:
                runs = runs_of(order, alike, samples.lengths, budget)
                tokens = np.array([samples.lengths[run].sum() for run in runs])
                kept[key] = [[i for k in members for i in runs[k]] for members in best_fit(tokens, budget)]
        return kept[key]

    def _order(self, samples: Samples, seed: int | list[int]) -> np.ndarray:
        """Indices of the samples of an epoch in order, ``(draws,)``, int64."""
        order = self.mixing.order(samples.source, self.shuffle, seed)
        alike = samples.of_one_beginning if self.keeps_beginnings and self.shuffle else None
        return order if alike is None else together(order, alike)

    def length(self, units: int) -> int:
        """Number of micro-batches per replica and epoch."""
        return -(-units // (self.micro_batch_size * self.replicas))

    def windows(
        self, units: Sequence[Unit], lengths: np.ndarray, accumulate: int, fill_last_window: bool = False
    ) -> Iterator[list[list[MicroBatch]]]:
        """Micro-batches of each replica, for each optimizer step.

        All replicas have the same number of micro-batches, and the same number of empty ones, which come first. A
        replica that has no units left in the last window gets ``[]`` where others compute.

        Args:
            units: units of the epoch, in order.
            lengths: tokens per sample, ``(samples,)``.
            accumulate: micro-batches per optimizer step.
            fill_last_window: add empty micro-batches to the last window, so that it has as many as the others.
        """
        step = self.micro_batch_size * self.replicas * accumulate
        for start in range(0, len(units), step):
            window = units[start : start + step]
            pieces = [window[i : i + self.micro_batch_size] for i in range(0, len(window), self.micro_batch_size)]
            shares = [pieces[replica :: self.replicas] for replica in range(self.replicas)]
            count = accumulate if fill_last_window else max(len(share) for share in shares)
            joined = [self._join([[i for unit in piece for i in unit] for piece in share], lengths) for share in shares]
            needed = max(len(share) for share in joined)
            yield [[[]] * (count - len(share)) + share for share in (_spread(share, needed) for share in joined)]

    def _join(self, micro_batches: list[MicroBatch], lengths: np.ndarray) -> list[MicroBatch]:
        if self.token_budget is None:
            return micro_batches
        joined: list[MicroBatch] = []
        room = 0
        for micro_batch in micro_batches:
            tokens = int(lengths[micro_batch].sum())
            if joined and tokens <= room:
                joined[-1] = joined[-1] + micro_batch
            else:
                joined.append(micro_batch)
                room = self.token_budget
            room -= tokens
        return joined


def together(order: np.ndarray, alike: np.ndarray) -> np.ndarray:
    """An order of samples in which those that are alike follow one another, as they come in the data.

    Args:
        order: indices of samples, ``(draws,)``; those that are drawn again stay where they are.
        alike: number of each sample, ``(samples,)``, equal for those that are alike.
    """
    if len(np.unique(order)) < len(order):
        return order
    first = np.full(int(alike.max()) + 1, len(order))
    np.minimum.at(first, alike[order], np.arange(len(order)))
    return order[np.lexsort((order, first[alike[order]]))]


def runs_of(order: np.ndarray, alike: np.ndarray, lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Samples that are packed as one, in order: of those that are alike and follow one another as many as fit a bin."""
    runs: list[list[int]] = []
    room = 0
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if runs and alike[runs[-1][-1]] == alike[i] and length <= room:
            runs[-1].append(i)
        else:
            runs.append([i])
            room = budget
        room -= length
    return runs


def _spread(share: list[MicroBatch], count: int) -> list[MicroBatch]:
    """Split the largest micro-batches until there are ``count``, or until none can be split."""
    share = list(share)
    while share and len(share) < count and max(map(len, share)) > 1:
        largest = max(range(len(share)), key=lambda i: len(share[i]))
        half = len(share[largest]) // 2
        share[largest : largest + 1] = [share[largest][:half], share[largest][half:]]
    return share


class Window(NamedTuple):
    """Facts on a window (an optimizer step) that its micro-batches hold."""

    tokens: int
    """Supervised tokens on this rank; where samples are pairs, the number of pairs."""
    sources: tuple[int, ...]
    """Sources with supervised tokens on any rank; a pair has some."""
    answers: tuple[int, ...]
    """Whether pairs have chosen answers (0) and rejected ones (1), on any rank; none where samples are no pairs."""
    micro_batches: Sequence[tuple[MicroBatch, bool]]
    """Its micro-batches on this rank, and whether any rank computes them, in its first one where the plan shows them;
    else none."""


Piece = tuple[MicroBatch, Window, bool]
"""Sample indices of a micro-batch, its window, and whether any rank computes."""


def micro_batches(
    units: Sequence[Unit],
    samples: Samples,
    plan: BatchPlan,
    replica: int,
    accumulate: int,
    fill_last_window: bool = False,
    skip: int = 0,
) -> Iterator[Piece]:
    """Micro-batches of one replica, window by window, but for the first ``skip``.

    ``fill_last_window`` is as in ``BatchPlan.windows``. Where the plan shows the window, its first one here does.
    """
    counts = np.ones_like(samples.supervised) if samples.has_pairs else samples.supervised
    for window in plan.windows(units, samples.lengths, accumulate, fill_last_window):
        mine = window[replica]
        tokens = int(sum(counts[members].sum() for members in mine if members))
        everywhere = [i for share in window for members in share for i in members]
        sources = np.unique(samples.source[everywhere][samples.supervised[everywhere] > 0])
        pieces = [(members, any(share[i] for share in window)) for i, members in enumerate(mine)]
        answers = samples.answers_in(everywhere)
        facts = Window(tokens, tuple(sources.tolist()), answers, pieces if plan.shows_window else [])
        for members, compute in pieces[skip:]:
            yield members, facts, compute
            facts = facts._replace(micro_batches=[])
        skip = max(0, skip - len(pieces))


def batch_geometry(plan: BatchPlan, accumulate: int) -> dict[str, int]:
    """Split of an optimizer step, for a saved position: units per micro-batch over all ranks, and micro-batches."""
    return {"units": plan.micro_batch_size * plan.replicas, "accumulate": accumulate}


def position_under(state: LoaderState, plan: BatchPlan, accumulate: int) -> int:
    """Convert a saved position to micro-batches per rank of the resumed run, whose ranks and sizes may differ.

    Args:
        state: state of a loader: ``position``, and ``deal``, the ``batch_geometry`` that it counts in.
        plan: plan of the resumed run.
        accumulate: micro-batches per optimizer step of the resumed run.

    Raises:
        RecipeError: the position is within an optimizer step, of the stopped run or of the resumed one.
    """
    now, then = batch_geometry(plan, accumulate), state.get("deal")
    if then is None or then == now:
        return int(state["position"])
    units, step = state["position"] * then["units"], now["units"] * accumulate
    if state["position"] % then["accumulate"] or units % step:
        raise RecipeError(
            f"the checkpoint is {units:,} samples into its epoch, after steps of {then['units'] * then['accumulate']}; "
            f"micro_batch_size x ranks x accumulate_grad_batches = {step} does not end a step there; choose them so "
            f"that they do (their product was {then['units'] * then['accumulate']}), or resume from the end of an epoch"
        )
    return int(units // now["units"])


def build_packed_batch(piece: Piece, samples: Samples) -> PackedBatch:
    """Build the packed batch of a micro-batch."""
    members, window, compute = piece
    batch = _packed(members, compute, samples, samples.pair)
    batch["window_tokens"], batch["window_sources"] = window.tokens, window.sources
    if samples.has_pairs:
        batch["window_answers"] = window.answers
    shown = [i for others, _ in window.micro_batches for i in others]
    if samples.has_pairs and window.micro_batches:
        computed = [(others, is_computed) for others, is_computed in window.micro_batches if is_computed]
        batch["window_mismatched"] = [_packed(*one, samples, _mismatched_in(samples)) for one in computed]
    elif shown:
        batch["window_members"] = [samples[i] for i in shown]
        if samples.values is not None:
            batch["window_rows"] = samples.values_of(shown)
    batch["source_names"] = samples.names
    return batch


_PairOf = Callable[[int], tuple[Conversation, Conversation]]
"""Chosen and rejected conversation of a sample, by its index."""


def _mismatched_in(samples: Samples) -> _PairOf:
    nothing = np.zeros(0, dtype=np.int64)
    return lambda index: (samples.mismatched(index), (nothing, nothing))


def _packed(members: MicroBatch, compute: bool, samples: Samples, pair_of: _PairOf) -> PackedBatch:
    """Packed batch of some samples, of pairs what ``pair_of`` gives; without samples, a dummy if any rank computes."""
    if members and samples.has_pairs:
        batch = pack_pairs([pair_of(i) for i in members], members, samples.source[members])
    elif members:
        batch = pack_samples([samples[i] for i in members], samples.source[members])
    elif compute:
        # Other replicas run the model now and wait for this one: one token, nothing supervised.
        ids, labels = samples[0]
        batch = pack_samples([(ids[:1], labels[:1])])
        batch["is_dummy"] = True
    else:
        batch = empty_batch()
    return with_no_pairs(batch) if samples.has_pairs and not members else batch


class _PackedBatches(Dataset[PackedBatch]):
    """Data set that builds packed batches; an index from the sampler is the micro-batch itself."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, piece: Piece) -> PackedBatch:
        batch, members = build_packed_batch(piece, self.samples), piece[0]
        if members:
            batch["sample_ids"] = self.samples.ids(members)
            batch["sample_sources"] = self.samples.sources_of(members)
            batch["sample_targets"] = sample_targets(batch)
            if self.samples.values is not None:
                batch["sample_rows"] = self.samples.values_of(members)
        return batch


def _as_is(batch: _Batch) -> _Batch:
    return batch


class PackedBatchLoader:
    """Dataloader of one replica's micro-batches, an epoch at a time, whose position can be saved.

    It counts its epochs itself: Lightning's count is one ahead in a checkpoint of a run that ``max_steps`` ended
    within an epoch. ``state_dict`` makes a resumed run continue with the next micro-batch.
    """

    def __init__(
        self,
        samples: Samples,
        plan: BatchPlan,
        *,
        replica: int = 0,
        accumulate: Callable[[], int] = lambda: 1,
        limit: int | float = 1.0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        """Prepare the loader.

        Args:
            samples: tokenized data.
            plan: distribution of the samples to micro-batches and ranks.
            replica: data-parallel rank of this process.
            accumulate: returns the micro-batches per optimizer step; called at the start of each epoch.
            limit: ``limit_train_batches``, micro-batches per epoch (int) or a fraction of them (float). The trainer
                ends the epoch; the loader has to know where, because the last optimizer step is shorter there.
            num_workers: number of processes that build packed batches; 0 builds them in this process.
            pin_memory: copy batches to page-locked memory, for CUDA.
        """
        self.samples, self.plan, self.replica = samples, plan, replica
        self._accumulate, self._limit = accumulate, limit
        self._workers, self._pin_memory = num_workers, pin_memory
        self._epoch = 0
        self._position = 0
        self._resume: LoaderState | None = None
        self._micro_batches_per_step = 0
        self._length = plan.length(len(plan.units(samples, 0)))
        self.batches = min(self._length, limit) if isinstance(limit, int) else int(self._length * limit)
        """Micro-batches of an epoch within the limit."""

    def __len__(self) -> int:
        return self._length

    def _units(self, epoch: int) -> list[Unit]:
        """Units of an epoch within the limit: a window's token count must not include micro-batches that never run."""
        return self.plan.units(self.samples, epoch)[: self.batches * self.plan.micro_batch_size * self.plan.replicas]

    def first_samples(self, micro_batches: int) -> np.ndarray:
        """Indices of the samples that so many micro-batches of all replicas hold in the first epoch, in their order."""
        units = self._units(0)[: micro_batches * self.plan.micro_batch_size * self.plan.replicas]
        return np.unique([i for unit in units for i in unit])

    def epoch_size(self) -> tuple[int, int, int]:
        """Samples, tokens and supervised tokens of the first epoch."""
        order = [i for unit in self._units(0) for i in unit]
        return len(order), int(self.samples.lengths[order].sum()), int(self.samples.supervised[order].sum())

    def state_dict(self) -> LoaderState:
        """Position: the epoch, the number of its micro-batches yielded so far, and their ``batch_geometry``."""
        if self._resume is not None:
            return self._resume
        return {
            "epoch": self._epoch,
            "position": self._position,
            "batches": self.batches,
            "is_over": self._position >= self.batches,
            "deal": batch_geometry(self.plan, self._micro_batches_per_step or self._accumulate()),
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue from a saved position at the next iteration; the number of ranks may differ."""
        self._resume = state

    def position_of(self, state: LoaderState) -> int:
        """Convert a saved position to this loader's micro-batches."""
        return self.batches if state.get("is_over") else position_under(state, self.plan, self._accumulate())

    @staticmethod
    def rewind(state: LoaderState, micro_batch: int, ready: int) -> None:
        """Set a saved position back to an earlier micro-batch of its epoch.

        Args:
            state: result of ``state_dict``, changed in place.
            micro_batch: number of the micro-batch that trains next, as the trainer counts.
            ready: number of micro-batches of the epoch that the trainer had begun at the time of saving.
        """
        ahead = state["position"] - ready  # beyond 1 where the trainer has counted an epoch's rest as a new epoch
        state["position"] = micro_batch + (0 if 0 <= ahead <= 1 else ahead)
        state["is_over"] = False

    @staticmethod
    def restart_epoch(state: LoaderState) -> None:
        """Set a saved position to the beginning of its epoch, unless that epoch was complete."""
        if not state["is_over"]:
            state["position"] = 0

    def micro_batches(self, epoch: int = 0, position: int = 0) -> Iterator[Piece]:
        """Micro-batches of this replica in an epoch, from a position on."""
        accumulate = self._micro_batches_per_step = self._accumulate()
        # Without the optimizer steps before the position: to distribute them again takes time by their number.
        begun = position - position % accumulate
        rest = self._units(epoch)[begun * self.plan.micro_batch_size * self.plan.replicas :]
        return micro_batches(rest, self.samples, self.plan, self.replica, accumulate, skip=position - begun)

    def __iter__(self) -> Iterator[PackedBatch]:
        # A generator: Lightning asks for the iterator before it restores the position, and draws from it after.
        resume, self._resume = self._resume, None
        if resume is not None:
            self._epoch, self._position = int(resume["epoch"]), self.position_of(resume)
        elif self._position < self.batches:
            self._position = 0  # an epoch that was left early starts again
        if self._position >= self.batches:
            self._epoch, self._position = self._epoch + 1, 0
        batches = batches_of(
            DataLoader(
                _PackedBatches(self.samples),
                batch_size=None,
                sampler=self.micro_batches(self._epoch, self._position),
                collate_fn=_as_is,
                num_workers=self._workers,
                pin_memory=self._pin_memory,
            )
        )
        for batch in batches:
            self._position += 1
            yield batch
