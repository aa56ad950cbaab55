"""One row: the padding-free layout of a micro-batch that data and model agree on.

The samples of a micro-batch are laid end to end in a single row of T tokens; positions restart at 0
with each sample, and attention is block-diagonal (see ``attention.py``). Labels are shifted here and
nowhere else: ``predict_at[i]`` is the place in the row whose hidden state predicts ``targets[i]``.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from lit_ft.balanced_partition import cut_evenly

IGNORE_INDEX = -100
"""Label of a token that is not supervised, as ``torch.nn.CrossEntropyLoss`` has it."""


class PackedBatch(TypedDict, total=False):
    """A micro-batch of S samples, T tokens and n supervised tokens."""

    input_ids: Tensor
    """``(1, T)``, int64."""
    position_ids: Tensor
    """``(1, T)``, int64, restarting at 0 with each sample."""
    segment_lengths: list[int]
    """S lengths that add up to T."""
    predict_at: Tensor
    """``(n,)``, int64: indices into the T tokens."""
    targets: Tensor
    """``(n,)``, int64: the supervised token ids."""
    target_sources: Tensor
    """``(n,)``, int64: which source each target is of, as a place in ``source_names``."""
    source_names: Sequence[str]
    """Sources with a loss curve of their own; empty where there is one source."""
    sample_ids: Sequence[str]
    """S ids, the same whenever a sample comes; absent where samples have no lasting place, as in a stream."""
    sample_sources: Sequence[str]
    """S names of sources, empty where there is one source; goes with ``sample_ids``."""
    sample_targets: Sequence[int]
    """S numbers of supervised tokens; goes with ``sample_ids``."""
    is_own: Tensor
    """``(n of the whole row,)``, bool: which targets are here, where a row's tokens are dealt out to ranks."""
    window_tokens: int
    """Supervised tokens of this rank's whole optimizer step (all its micro-batches)."""


def pack_samples(
    samples: Sequence[tuple[np.ndarray, np.ndarray]], sources: Sequence[int] | np.ndarray | None = None
) -> PackedBatch:
    """Build the row of some samples, each a pair ``(ids, labels)`` of equal length, labels unshifted.

    ``sources`` says which source each sample is of; None is one for all.

    The first token of a sample is never a target: nothing within the sample comes before it.
    """
    lengths = [len(ids) for ids, _ in samples]
    ids = np.concatenate([ids for ids, _ in samples]).astype(np.int64)
    labels = np.concatenate([labels for _, labels in samples]).astype(np.int64)
    starts = np.cumsum([0, *lengths[:-1]])
    labels[starts] = IGNORE_INDEX
    supervised = np.flatnonzero(labels != IGNORE_INDEX)
    of_token = np.repeat(np.zeros(len(lengths), dtype=np.int64) if sources is None else sources, lengths)
    return PackedBatch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(np.arange(len(ids)) - np.repeat(starts, lengths))[None],
        segment_lengths=lengths,
        predict_at=torch.from_numpy(supervised - 1),
        targets=torch.from_numpy(labels[supervised]),
        target_sources=torch.from_numpy(of_token[supervised]),
    )


def sample_targets(row: PackedBatch) -> list[int]:
    """S numbers of supervised tokens; of a row that is on the host yet."""
    ends = np.cumsum(row["segment_lengths"])
    counts: list[int] = np.diff(np.searchsorted(row["predict_at"].numpy(), ends), prepend=0).tolist()
    return counts


def empty_row() -> PackedBatch:
    """A micro-batch without work: its samples fitted into another row of the same optimizer step."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        input_ids=nothing[None],
        position_ids=nothing[None],
        segment_lengths=[],
        predict_at=nothing,
        targets=nothing,
        target_sources=nothing,
    )


def split(row: PackedBatch, parts: int) -> list[PackedBatch]:
    """A row as several, by whole samples in order, about equal in tokens; parts without samples are dummies.

    A dummy is one token that predicts nothing: it can be computed, and adds nothing to loss or gradients.
    """
    lengths = row["segment_lengths"]
    samples = cut_evenly(lengths, min(parts, len(lengths)))
    pieces = [_cut(row, lengths, part.start, part.stop) for part in samples]
    return pieces + [_dummy(row["input_ids"].device)] * (parts - len(pieces))


def _cut(row: PackedBatch, lengths: Sequence[int], first: int, last: int) -> PackedBatch:
    start, end = sum(lengths[:first]), sum(lengths[:last])
    at = row["predict_at"]
    is_here = (at >= start) & (at < end)
    piece = PackedBatch(
        input_ids=row["input_ids"][:, start:end],
        position_ids=row["position_ids"][:, start:end],
        segment_lengths=list(lengths[first:last]),
        predict_at=at[is_here] - start,
        targets=row["targets"][is_here],
    )
    if "target_sources" in row:
        piece["target_sources"] = row["target_sources"][is_here]
    return piece


def _dummy(device: torch.device) -> PackedBatch:
    row = pack_samples([(np.zeros(1, dtype=np.int64), np.full(1, IGNORE_INDEX))])
    for name in ("input_ids", "position_ids", "predict_at", "targets", "target_sources"):
        row[name] = row[name].to(device)
    return row


def pad_to_multiple(row: PackedBatch, of: int) -> PackedBatch:
    """The row with a last sample of dummy tokens, which predict nothing: its tokens are a multiple of ``of``."""
    missing = -row["input_ids"].numel() % of
    if missing == 0:
        return row
    ids = row["input_ids"]
    return {
        **row,
        "input_ids": torch.cat([ids, ids.new_zeros(1, missing)], dim=1),
        "position_ids": torch.cat([row["position_ids"], torch.arange(missing, device=ids.device)[None]], dim=1),
        "segment_lengths": [*row["segment_lengths"], missing],
    }


def as_packed_batch(batch: PackedBatch | Mapping[str, Tensor]) -> PackedBatch:
    """A row as it is; a padded batch (``input_ids``, ``labels``, optional ``attention_mask``) as a row."""
    if "segment_lengths" in batch:
        return cast(PackedBatch, batch)
    padded = cast(Mapping[str, Tensor], batch)
    return from_padded(padded["input_ids"], padded["labels"], padded.get("attention_mask"))


def from_padded(input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> PackedBatch:
    """Turn a padded batch in Hugging Face's convention into a row; padding is never computed.

    Args:
        input_ids: ``(samples, length)``.
        labels: ``(samples, length)``, unshifted, ``-100`` where not supervised.
        attention_mask: ``(samples, length)``, 1 on real tokens; None when nothing is padded.
    """
    keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    real = keep.bool().cpu().numpy()
    ids, targets = input_ids.cpu().numpy(), labels.cpu().numpy()
    row = pack_samples([(ids[i][real[i]], targets[i][real[i]]) for i in range(len(ids)) if real[i].any()])
    for name in ("input_ids", "position_ids", "predict_at", "targets", "target_sources"):
        row[name] = row[name].to(input_ids.device)
    return row


class TokenLoss(NamedTuple):
    """What a row's supervised tokens come to."""

    loss_sum: Tensor
    """Scalar, fp32: cross-entropy summed over the tokens, in nats."""
    correct: Tensor
    """Scalar, int64: tokens whose highest logit is the target's."""
    per_token: Tensor
    """``(n,)``, fp32: what ``loss_sum`` is the sum of; without gradient."""
