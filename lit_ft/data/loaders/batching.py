"""Which samples go into which micro-batch of which rank: index arithmetic, known before an epoch starts.

Words: a *unit* is what ``micro_batch_size`` counts (a sample, or a packed bin of samples); a *window*
is the micro-batches of one optimizer step; a *replica* is a data-parallel rank.

One global order of units is dealt out, so that the samples of an optimizer step do not depend on how
the step is split into micro-batches and ranks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from lit_ft.data.loaders.mixing import Mixing
from lit_ft.data.loaders.packing import best_fit
from lit_ft.data.tokens.samples import Samples
from lit_ft.errors import RecipeError
from lit_ft.packed_batch import PackedBatch, empty_row, pack_samples, sample_targets

MicroBatch = list[int]
"""Indices of the samples laid end to end; empty when there is nothing to compute."""


@dataclass(frozen=True)
class BatchPlan:
    """How samples are dealt out."""

    micro_batch_size: int
    """Units per micro-batch and replica."""
    packing: int | None = None
    """Token budget of a packed bin; None leaves samples as they are."""
    token_budget: int | None = None
    """Micro-batches of one window are joined while they fit in so many tokens; None never joins."""
    shuffle: bool = False
    seed: int = 0
    replicas: int = 1
    mixing: Mixing = field(default_factory=Mixing)

    def units(self, samples: Samples, *place: int) -> list[MicroBatch]:
        """The units of an epoch, or of what else ``place`` numbers, in order."""
        if self.packing is None:
            order = self.mixing.order(samples.source, self.shuffle, [self.seed, *place])
            return [[i] for i in order.tolist()]
        # The same bins each epoch: their number is the epoch's length, which the trainer asks for once.
        order = self.mixing.order(samples.source, self.shuffle, self.seed)
        units = best_fit(samples.lengths[order], self.packing)
        units = [order[members].tolist() for members in units]
        if not self.shuffle:
            return units
        return [units[i] for i in np.random.default_rng([self.seed, *place]).permutation(len(units))]

    def length(self, units: int) -> int:
        """Micro-batches per replica and epoch."""
        return -(-units // (self.micro_batch_size * self.replicas))

    def windows(
        self, units: Sequence[MicroBatch], lengths: np.ndarray, accumulate: int, whole: bool = False
    ) -> Iterator[list[list[MicroBatch]]]:
        """For each optimizer step, each replica's micro-batches.

        All replicas have the same number of micro-batches, and of empty ones, which come first. A replica
        that is out of units in the last window gets ``[]`` where others compute.

        Args:
            units: what is dealt out.
            lengths: tokens of each sample.
            accumulate: micro-batches per optimizer step.
            whole: give the last window as many micro-batches as the others, by empty ones.
        """
        step = self.micro_batch_size * self.replicas * accumulate
        for start in range(0, len(units), step):
            window = units[start : start + step]
            pieces = [window[i : i + self.micro_batch_size] for i in range(0, len(window), self.micro_batch_size)]
            shares = [pieces[replica :: self.replicas] for replica in range(self.replicas)]
            count = accumulate if whole else max(len(share) for share in shares)
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


def _spread(share: list[MicroBatch], count: int) -> list[MicroBatch]:
    """Split the largest micro-batches until there are ``count``, where they can be split."""
    share = list(share)
    while share and len(share) < count and max(map(len, share)) > 1:
        largest = max(range(len(share)), key=lambda i: len(share[i]))
        half = len(share[largest]) // 2
        share[largest : largest + 1] = [share[largest][:half], share[largest][half:]]
    return share


Piece = tuple[MicroBatch, int, bool]
"""Members of a micro-batch, supervised tokens of its window on this rank, and whether any rank computes."""


def micro_batches(
    units: Sequence[MicroBatch], samples: Samples, plan: BatchPlan, replica: int, accumulate: int, whole: bool = False
) -> Iterator[Piece]:
    """One replica's micro-batches of some units, window by window; ``whole`` as in ``BatchPlan.windows``."""
    for window in plan.windows(units, samples.lengths, accumulate, whole):
        mine = window[replica]
        tokens = int(sum(samples.supervised[members].sum() for members in mine if members))
        for i, members in enumerate(mine):
            yield members, tokens, any(share[i] for share in window)


def batch_geometry(plan: BatchPlan, accumulate: int) -> dict[str, int]:
    """How an optimizer step is split, for a saved place: units of a micro-batch over all ranks, micro-batches."""
    return {"units": plan.micro_batch_size * plan.replicas, "accumulate": accumulate}


def position_under(state: dict[str, Any], plan: BatchPlan, accumulate: int) -> int:
    """A saved position as a number of micro-batches of each rank, however the steps before it were split.

    Args:
        state: of a loader: ``position`` and the ``deal`` it counts by.
        plan: of the resumed run.
        accumulate: micro-batches of its optimizer steps.

    Raises:
        RecipeError: the place is within an optimizer step, of the stopped run or of the resumed one.
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


def lay_out(piece: Piece, samples: Samples) -> PackedBatch:
    """The row of a micro-batch."""
    members, window_tokens, compute = piece
    if members:
        row = pack_samples([samples[i] for i in members], samples.source[members])
    elif compute:
        # Other replicas run the model now and wait for this one: one token, nothing supervised.
        ids, labels = samples[0]
        row = pack_samples([(ids[:1], labels[:1])])
    else:
        row = empty_row()
    row["window_tokens"] = window_tokens
    row["source_names"] = samples.names
    return row


class _Rows(Dataset[PackedBatch]):
    """Lays out micro-batches; what the sampler yields is the micro-batch itself."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, piece: Any) -> PackedBatch:
        row, members = lay_out(piece, self.samples), piece[0]
        if members:
            row["sample_ids"] = self.samples.ids(members)
            row["sample_sources"] = self.samples.sources_of(members)
            row["sample_targets"] = sample_targets(row)
        return row


def _as_it_is(row: Any) -> Any:
    return row


class RowLoader:
    """Iterates one replica's micro-batches, an epoch at a time, and remembers its place.

    It is what a Trainer is given as a dataloader. It counts its epochs itself: Lightning's count is one ahead in
    a checkpoint of a run that ``max_steps`` ended within an epoch. ``state_dict`` makes a resumed run go on with
    the next micro-batch.
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
            samples: the tokenized data.
            plan: how it is dealt out.
            replica: which share is this rank's.
            accumulate: micro-batches per optimizer step, asked for at the start of each epoch.
            limit: ``limit_train_batches``, micro-batches per epoch (int) or a share of them (float). The trainer cuts
                the epoch; the loader has to know where, because the last optimizer step is shorter there.
            num_workers: processes that lay rows end to end; 0 does it in this one.
            pin_memory: page-locked rows, for CUDA.
        """
        self.samples, self.plan, self.replica = samples, plan, replica
        self._accumulate, self._limit = accumulate, limit
        self._workers, self._pin_memory = num_workers, pin_memory
        self.seconds_waited = 0.0
        """Time that the training loop has waited for rows."""
        self._epoch = 0
        self._position = 0
        self._resume: dict[str, Any] | None = None
        self._dealt = 0
        self._length = plan.length(len(plan.units(samples, 0)))
        self.batches = min(self._length, limit) if isinstance(limit, int) else int(self._length * limit)
        """Micro-batches of an epoch within the limit."""

    def __len__(self) -> int:
        return self._length

    def _units(self, epoch: int) -> list[MicroBatch]:
        """An epoch's units within the limit: a window's token count must not include what is never run."""
        return self.plan.units(self.samples, epoch)[: self.batches * self.plan.micro_batch_size * self.plan.replicas]

    def epoch_size(self) -> tuple[int, int, int]:
        """Samples of the first epoch, their tokens, and how many of these are supervised."""
        order = [i for unit in self._units(0) for i in unit]
        return len(order), int(self.samples.lengths[order].sum()), int(self.samples.supervised[order].sum())

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its micro-batches were handed out, and how these were dealt."""
        if self._resume is not None:
            return self._resume
        return {
            "epoch": self._epoch,
            "position": self._position,
            "batches": self.batches,
            "is_over": self._position >= self.batches,
            "deal": batch_geometry(self.plan, self._dealt or self._accumulate()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place at the next iteration, whatever the number of ranks was."""
        self._resume = state

    def position_of(self, state: dict[str, Any]) -> int:
        """A saved position, in this loader's micro-batches."""
        return self.batches if state.get("is_over") else position_under(state, self.plan, self._accumulate())

    @staticmethod
    def rewind(state: dict[str, Any], micro_batch: int, ready: int) -> None:
        """Set a saved place back to an earlier micro-batch of its epoch.

        Args:
            state: of ``state_dict``, changed in place.
            micro_batch: the one that trains next, counted by the trainer.
            ready: micro-batches of the epoch that the trainer had begun when it was saved.
        """
        ahead = state["position"] - ready  # beyond 1 where the trainer has counted an epoch's rest as a new epoch
        state["position"] = micro_batch + (0 if 0 <= ahead <= 1 else ahead)
        state["is_over"] = False

    @staticmethod
    def begin_again(state: dict[str, Any]) -> None:
        """Set a saved place to the beginning of its epoch, unless that was over."""
        if not state["is_over"]:
            state["position"] = 0

    def micro_batches(self, epoch: int = 0) -> Iterator[Piece]:
        """This replica's share of an epoch."""
        self._dealt = self._accumulate()
        return micro_batches(self._units(epoch), self.samples, self.plan, self.replica, self._dealt)

    def __iter__(self) -> Iterator[PackedBatch]:
        # A generator: Lightning asks for the iterator before it restores the place, and draws from it after.
        resume, self._resume = self._resume, None
        if resume is not None:
            self._epoch, self._position = int(resume["epoch"]), self.position_of(resume)
        elif self._position < self.batches:
            self._position = 0  # an epoch that was left begins again
        if self._position >= self.batches:
            self._epoch, self._position = self._epoch + 1, 0
        sampler: Any = islice(self.micro_batches(self._epoch), self._position, None)
        rows = iter(
            DataLoader(
                _Rows(self.samples),
                batch_size=None,
                sampler=sampler,
                collate_fn=_as_it_is,
                num_workers=self._workers,
                pin_memory=self._pin_memory,
            )
        )
        while True:
            started = time.perf_counter()
            row = next(rows, None)
            self.seconds_waited += time.perf_counter() - started
            if row is None:
                return
            self._position += 1
            yield row
