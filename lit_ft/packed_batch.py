"""The packed batch: the padding-free layout of a micro-batch, shared by data and model.

The samples of a micro-batch are concatenated into one sequence of T tokens; position ids restart at 0
with each sample, and attention is block-diagonal (see ``model/attention``). Labels are shifted here and
nowhere else: ``predict_at[i]`` is the index of the token whose hidden state predicts ``targets[i]``.
A *window* is the micro-batches of one optimizer step.

Where a sample is a pair of preference data, its chosen and its rejected conversation are two segments, in this order:
P pairs are 2P segments. Where answers are unpaired, one of both is missing in each pair, and P pairs are P segments.
``target_answers``, ``pairs`` and ``pair_sources`` are in every batch of such data, of length 0 in one without pairs,
and in no other.

Samples that begin alike share their first tokens (``SharedPrefixes``). A token's hidden state depends on the tokens
before it alone, so that of a prompt is the same for all answers to it: for both answers of a preference pair, for all
that a model gives to a prompt, for samples that begin with one system prompt or one list of tools. Those tokens may be
computed once; other tokens of a sample then attend to those of the sample before it. Hidden states are repeated
afterwards, so that who reads them sees the packed batch as it is.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lit_ft.balanced_partition import split_evenly
from lit_ft.errors import RecipeError

IGNORE_INDEX = -100
"""Label of a token that is not supervised, the default ``ignore_index`` of ``torch.nn.CrossEntropyLoss``."""


Conversation = tuple[np.ndarray, np.ndarray]
"""Ids and labels of a sample, each ``(tokens,)``, labels unshifted."""


LEAST_SHARE = 0.1
"""Least share of a batch's tokens that sharing saves; gathering keys and values takes time too."""


class SharedPrefixes:
    """Prefixes that the S samples of a packed batch of T tokens share, each with the sample before it."""

    def __init__(self, lengths: Sequence[int], shared: Sequence[int]) -> None:
        """Set what is shared.

        Args:
            lengths: tokens of each sample.
            shared: first tokens of each that are those of the sample before it: 0 for the first sample, less than its
                length for each.
        """
        self.lengths, self.shared = list(lengths), list(shared)
        self.is_used = False
        """Whether the model that has computed the batch last has left them out."""

    @classmethod
    def of(cls, samples: Sequence[np.ndarray]) -> "SharedPrefixes | None":
        """Prefixes of samples, each the ids of its tokens; None where sharing them saves too little."""
        shared = [0, *(_common(before, ids) for before, ids in pairwise(samples))]
        lengths = [len(ids) for ids in samples]
        return cls(lengths, shared) if sum(shared) >= max(LEAST_SHARE * sum(lengths), 1) else None

    @property
    def own_lengths(self) -> list[int]:
        """Tokens of each sample that are computed."""
        return [length - shared for length, shared in zip(self.lengths, self.shared, strict=True)]

    @cached_property
    def computed(self) -> np.ndarray:
        """Which of the T tokens are computed, ``(T',)``, int64."""
        starts = np.cumsum([0, *self.lengths[:-1]])
        parts = zip(starts, self.lengths, self.shared, strict=True)
        return np.concatenate([np.arange(start + shared, start + length) for start, length, shared in parts])

    @cached_property
    def places(self) -> np.ndarray:
        """Where each of the T tokens is among those that are computed, ``(T,)``, int64."""
        of_samples: list[np.ndarray] = []
        before, taken = np.zeros(0, dtype=np.int64), 0
        for shared, own in zip(self.shared, self.own_lengths, strict=True):
            before = np.concatenate([before[:shared], np.arange(taken, taken + own)])
            of_samples.append(before)
            taken += own
        return np.concatenate(of_samples)


def _common(before: np.ndarray, ids: np.ndarray) -> int:
    """Number of first tokens that two samples have in common; the second one keeps its last token."""
    most = min(len(before), len(ids) - 1)
    differ = np.flatnonzero(before[:most] != ids[:most])
    return int(differ[0]) if len(differ) else max(most, 0)


class RowValues(NamedTuple):
    """What rewards read of the row that a sample was made of."""

    columns: Mapping[str, object] = MappingProxyType({})
    """Values by the names of their columns; None where the row has none."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Turns before the last supervised answer, each with role and content."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of the functions that may be called."""
    has_answer: bool = True
    """Whether the row has a known answer; otherwise a question mark stands in its place."""


class PackedBatch(TypedDict, total=False):
    """A micro-batch of S samples (where samples are pairs: of P pairs), T tokens and n supervised tokens."""

    input_ids: Tensor
    """``(1, T)``, int64."""
    position_ids: Tensor
    """``(1, T)``, int64, restarting at 0 with each sample."""
    segment_lengths: list[int]
    """S lengths that add up to T; of pairs 2P, or P where answers are unpaired."""
    shared_prefixes: SharedPrefixes
    """First tokens that samples have in common; absent where there are few. A part of the batch may not have it."""
    is_dummy: bool
    """Present where the batch is no sample but one token that predicts nothing, which a rank computes because others do
    or because none of its samples trains; throughput does not count it."""
    predict_at: Tensor
    """``(n,)``, int64: indices into the T tokens."""
    targets: Tensor
    """``(n,)``, int64: the supervised token ids."""
    target_sources: Tensor
    """``(n,)``, int64: the source of each target, an index into ``source_names``."""
    target_answers: Tensor
    """``(n,)``, int64: the answer of each target: 2i is the chosen one of pair i, 2i + 1 the rejected one."""
    pairs: Tensor
    """``(P,)``, int64: index of each pair among the samples of its set."""
    pair_sources: Tensor
    """``(P,)``, int64: the source of each pair, an index into ``source_names``."""
    source_names: Sequence[str]
    """Names of the sources that have their own loss curve; empty where there is one source."""
    sample_ids: Sequence[str]
    """S ids (P of pairs), the same in each epoch; absent where samples have no fixed position, as in a stream."""
    sample_sources: Sequence[str]
    """S names of sources (P of pairs), each empty where there is one source; present with ``sample_ids``."""
    sample_targets: Sequence[int]
    """S numbers of supervised tokens (P of pairs, of both answers); present with ``sample_ids``."""
    sample_rows: Sequence[RowValues]
    """S times what rewards read of the sample's row; absent where they read nothing of it."""
    is_local: Tensor
    """``(n of the full batch,)``, bool: targets on this rank, where the tokens are sharded across ranks."""
    token_group: ProcessGroup
    """Ranks that the tokens are sharded across; present with ``is_local``."""
    reference_log_probs: Tensor
    """``(P, 2)``, fp32: log-probabilities of the chosen and the rejected answer of each pair by the model as it was
    before training, which ``PreferenceLM`` adds; 0 where its objective does not need them, and of missing answers."""
    divergence: Tensor
    """Scalar, fp32: estimate of how far the model is from what it was before training, which ``PreferenceLM`` adds; 0
    where its objective does not need it."""
    target_weights: Tensor
    """``(n,)``, fp32: factor on the loss of each target, where answers that the model gave train it."""
    target_kl_weights: Tensor
    """``(n,)``, fp32: factor on each target's divergence from a reference; absent where the loss has no part of it."""
    target_reference: Tensor
    """``(n,)``, fp32: cross-entropy of each target by the reference; present with ``target_kl_weights``."""
    target_teacher: Tensor
    """``(n, H)``: final hidden states of a teacher at the tokens that predict the targets, where it has a part in the
    loss or is compared with."""
    teacher_ratio: float
    """Part of the divergence from the teacher in the loss, from 0 to 1; present with ``target_teacher``."""
    terms: int
    """What the loss is a mean over, present with ``target_weights``: number of answers of the batch, or of their
    tokens, also of those that it does not hold because their factor is 0."""
    terms_held: int
    """Those of ``terms`` whose tokens the batch holds."""
    window_tokens: int
    """What the loss is a mean over: supervised tokens of this rank in the window, over all its micro-batches; where
    samples are pairs, the number of its pairs."""
    loss_weight: float | Tensor
    """Factor on the summed loss that makes it this micro-batch's part in the loss of its window, which the module adds
    in training; a pipeline, which computes gradients before the module knows the loss, puts it into them."""
    window_members: Sequence[Conversation]
    """Ids and labels of all samples of this rank in the window, in its first micro-batch, where a module answers their
    prompts at once."""
    window_rows: Sequence[RowValues]
    """The ``sample_rows`` of ``window_members``."""
    window_mismatched: "Sequence[PackedBatch]"
    """Where a module needs the divergence, in the first micro-batch of a window: for each one of this rank its pairs'
    prompts, each with an answer to another one, as the chosen one of a pair without a rejected one. Micro-batches that
    no rank computes are left out."""
    window_sources: Sequence[int]
    """Sources with supervised tokens (or pairs) in the window, on any rank, as indices into ``source_names``."""
    window_answers: Sequence[int]
    """Whether the window's pairs have chosen answers (0) and rejected ones (1), on any rank; of pairs alone."""


def pack_samples(
    samples: Sequence[tuple[np.ndarray, np.ndarray]], sources: Sequence[int] | np.ndarray | None = None
) -> PackedBatch:
    """Concatenate samples into a packed batch.

    The first token of a sample is never a target: no token of the sample comes before it.

    Args:
        samples: pairs ``(ids, labels)`` of equal length, labels unshifted.
        sources: source number of each sample, ``(samples,)``; None is source 0 for all.
    """
    lengths = [len(ids) for ids, _ in samples]
    ids = np.concatenate([ids for ids, _ in samples]).astype(np.int64)
    labels = np.concatenate([labels for _, labels in samples]).astype(np.int64)
    starts = np.cumsum([0, *lengths[:-1]])
    labels[starts] = IGNORE_INDEX
    supervised = np.flatnonzero(labels != IGNORE_INDEX)
    of_token = np.repeat(np.zeros(len(lengths), dtype=np.int64) if sources is None else sources, lengths)
    batch = PackedBatch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(np.arange(len(ids)) - np.repeat(starts, lengths))[None],
        segment_lengths=lengths,
        predict_at=torch.from_numpy(supervised - 1),
        targets=torch.from_numpy(labels[supervised]),
        target_sources=torch.from_numpy(of_token[supervised]),
    )
    if (shared := SharedPrefixes.of([ids for ids, _ in samples])) is not None:
        batch["shared_prefixes"] = shared
    return batch


def pack_pairs(
    pairs: Sequence[tuple[Conversation, Conversation]],
    numbers: Sequence[int],
    sources: Sequence[int] | np.ndarray,
) -> PackedBatch:
    """Concatenate pairs of preference data into a packed batch, chosen before rejected.

    Args:
        pairs: chosen and rejected conversation of each of P pairs, one of which is empty where answers are unpaired.
        numbers: index of each pair among the samples of its set, ``(P,)``.
        sources: source number of each pair, ``(P,)``.
    """
    halves = [half for pair in pairs for half in pair]
    present = np.array([k for k, (ids, _) in enumerate(halves) if len(ids)])
    batch = pack_samples([halves[k] for k in present], np.repeat(sources, 2)[present])
    batch["target_answers"] = torch.from_numpy(np.repeat(present, _targets_of_segments(batch)))
    batch["pairs"] = torch.tensor(numbers, dtype=torch.int64)
    batch["pair_sources"] = torch.from_numpy(np.array(sources, dtype=np.int64))
    return batch


def with_no_pairs(batch: PackedBatch) -> PackedBatch:
    """A batch without targets, as one of data that consists of pairs."""
    nothing = batch["targets"].new_zeros(0)
    entries = PackedBatch(target_answers=nothing, pairs=nothing, pair_sources=nothing)
    reference = PackedBatch(
        reference_log_probs=torch.zeros(0, 2, device=nothing.device), divergence=torch.zeros((), device=nothing.device)
    )
    return {**batch, **entries, **reference}


def sample_targets(batch: PackedBatch) -> list[int]:
    """Number of supervised tokens of each of the S samples, or P pairs, of a packed batch on the host."""
    counts = _targets_of_segments(batch)
    return counts.reshape(-1, _segments_of_sample(batch)).sum(1).tolist()


def _segments_of_sample(batch: PackedBatch) -> int:
    pairs = len(batch.get("pairs", ()))
    return len(batch["segment_lengths"]) // pairs if pairs else 1


def _targets_of_segments(batch: PackedBatch) -> np.ndarray:
    ends = np.cumsum(batch["segment_lengths"])
    return np.diff(np.searchsorted(batch["predict_at"].numpy(), ends), prepend=0)


def terms_of_mean(batch: PackedBatch) -> int:
    """Number of what the loss is the mean over: supervised tokens of a packed batch, its pairs, or weighted answers."""
    if "terms" in batch:
        return batch["terms"]
    return len(batch["pairs"] if "pairs" in batch else batch["targets"])


def terms_in_batch(batch: PackedBatch) -> int:
    """Those of ``terms_of_mean`` whose tokens the batch holds: of weighted answers, not those whose factor is 0."""
    return batch["terms_held"] if "terms_held" in batch else terms_of_mean(batch)


def empty_batch() -> PackedBatch:
    """Empty packed batch, for a micro-batch whose samples were joined to another one of the same optimizer step."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        input_ids=nothing[None],
        position_ids=nothing[None],
        segment_lengths=[],
        predict_at=nothing,
        targets=nothing,
        target_sources=nothing,
    )


def split(batch: PackedBatch, parts: int) -> list[PackedBatch]:
    """Split a packed batch between samples into ``parts``, in order and of about the same number of tokens.

    A pair is never parted; its answers are counted from 0 in each part. Where there are fewer samples than parts, the
    rest are dummies: one token that predicts nothing, which can be computed and adds nothing to loss or gradients.
    """
    segments = batch["segment_lengths"]
    size = _segments_of_sample(batch)
    lengths = [sum(segments[at : at + size]) for at in range(0, len(segments), size)]
    samples = split_evenly(lengths, min(parts, len(lengths)))
    pieces = [_part(batch, segments, size * part.start, size * part.stop) for part in samples]
    dummy = dummy_batch(batch["input_ids"].device)
    dummy = with_factors(dummy, batch, batch["predict_at"].new_zeros(0))
    return pieces + [with_no_pairs(dummy) if "pairs" in batch else dummy] * (parts - len(pieces))


def _part(batch: PackedBatch, lengths: Sequence[int], first: int, last: int) -> PackedBatch:
    start, end = sum(lengths[:first]), sum(lengths[:last])
    at = batch["predict_at"]
    here = ((at >= start) & (at < end)).nonzero()[:, 0]  # once: on CUDA the host waits for it, as for each mask
    piece = PackedBatch(
        input_ids=batch["input_ids"][:, start:end],
        position_ids=batch["position_ids"][:, start:end],
        segment_lengths=list(lengths[first:last]),
        predict_at=at[here] - start,
        targets=batch["targets"][here],
    )
    if "target_sources" in batch:
        piece["target_sources"] = batch["target_sources"][here]
    piece = with_factors(piece, batch, here)
    if "pairs" in batch:
        size = _segments_of_sample(batch)
        pairs = slice(first // size, last // size)
        piece["target_answers"] = batch["target_answers"][here] - 2 * pairs.start
        piece["pairs"], piece["pair_sources"] = batch["pairs"][pairs], batch["pair_sources"][pairs]
        if "reference_log_probs" in batch:
            piece["reference_log_probs"], piece["divergence"] = batch["reference_log_probs"][pairs], batch["divergence"]
    return piece


def with_factors(piece: PackedBatch, of: PackedBatch, here: Tensor) -> PackedBatch:
    """A piece of a packed batch with what its targets have in the loss besides their cross-entropy.

    Args:
        piece: the piece.
        of: the packed batch, of n targets.
        here: indices of the piece's targets among the n, int64.
    """
    factors = PackedBatch()
    if "target_weights" in of:
        factors["target_weights"] = of["target_weights"][here]
    if "target_kl_weights" in of:
        factors["target_kl_weights"] = of["target_kl_weights"][here]
        factors["target_reference"] = of["target_reference"][here]
    if "target_teacher" in of:
        factors["target_teacher"], factors["teacher_ratio"] = of["target_teacher"][here], of["teacher_ratio"]
    return {**piece, **factors}


def dummy_batch(device: torch.device) -> PackedBatch:
    """A batch of one token that predicts nothing, which adds nothing to loss or gradients."""
    batch = pack_samples([(np.zeros(1, dtype=np.int64), np.full(1, IGNORE_INDEX))])
    for name in ("input_ids", "position_ids", "predict_at", "targets", "target_sources"):
        batch[name] = batch[name].to(device)
    batch["is_dummy"] = True
    return batch


def pad_to_multiple(batch: PackedBatch, of: int) -> PackedBatch:
    """Append a sample of dummy tokens that predict nothing, so that the number of tokens is a multiple of ``of``.

    Samples of the result share no prefixes, unless any number of tokens would do.
    """
    missing = -batch["input_ids"].numel() % of
    if of == 1:
        return batch
    batch = batch.copy()
    batch.pop("shared_prefixes", None)
    if missing == 0:
        return batch
    ids = batch["input_ids"]
    return {
        **batch,
        "input_ids": torch.cat([ids, ids.new_zeros(1, missing)], dim=1),
        "position_ids": torch.cat([batch["position_ids"], torch.arange(missing, device=ids.device)[None]], dim=1),
        "segment_lengths": [*batch["segment_lengths"], missing],
    }


def as_packed_batch(batch: PackedBatch | Mapping[str, Tensor], vocabulary: int | None = None) -> PackedBatch:
    """Pack a padded batch, see ``from_padded``; return a packed one unchanged.

    ``vocabulary`` is the number of the model's embeddings, below which all ids must be.

    Raises:
        RecipeError: it is no such batch.
    """
    if not isinstance(batch, Mapping):
        raise RecipeError(
            f"data: a batch is of type {type(batch).__name__}; CausalLM takes mappings with input_ids, labels, -100 "
            "where nothing is supervised, and attention_mask where it is padded"
        )
    if "segment_lengths" in batch:
        return cast(PackedBatch, batch)
    padded = cast(Mapping[str, Tensor], batch)
    if missing := [name for name in ("input_ids", "labels") if name not in padded]:
        raise RecipeError(
            f"data: a batch has no {missing[0]!r} (it has {', '.join(map(repr, padded)) or 'nothing'}); CausalLM takes "
            "input_ids and labels, -100 where nothing is supervised, and attention_mask where it is padded"
        )
    parts = {name: padded.get(name) for name in ("input_ids", "labels", "attention_mask", "position_ids")}
    tensors = {name: part for name, part in parts.items() if part is not None}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or padded["input_ids"].dim() != 2:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise RecipeError(f"data: a batch has {given}; each must be of one shape, (samples, length)")
    return from_padded(**tensors, vocabulary=vocabulary)


def from_padded(
    input_ids: Tensor,
    labels: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    vocabulary: int | None = None,
) -> PackedBatch:
    """Convert a padded batch in Hugging Face's convention to a packed batch; padding is removed.

    Args:
        input_ids: token ids, ``(samples, length)``.
        labels: labels, ``(samples, length)``, unshifted, ``-100`` where not supervised.
        attention_mask: ``(samples, length)``, 1 on real tokens; None when nothing is padded.
        position_ids: ``(samples, length)``: where they begin at 0 again within a row, it holds several samples.
        vocabulary: number of the model's embeddings; None compares no ids with it.

    Raises:
        RecipeError: positions are not those that the samples would have without them, or an id is outside of the
            vocabulary.
    """
    keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    real = keep.bool().cpu().numpy()
    ids, targets = input_ids.cpu().numpy(), labels.cpu().numpy()
    rows = [(ids[i][real[i]], targets[i][real[i]]) for i in range(len(ids)) if real[i].any()]
    if not rows:
        raise RecipeError(
            f"data: a batch of shape {tuple(input_ids.shape)} has no token: its attention_mask is 0 everywhere; leave "
            "rows without tokens out"
        )
    if vocabulary is not None:
        _check_ids(rows, vocabulary)
    if position_ids is not None:
        positions = position_ids.cpu().numpy()
        of_rows = [positions[i][real[i]] for i in range(len(ids)) if real[i].any()]
        rows = [part for row, at in zip(rows, of_rows, strict=True) for part in _samples_of_row(*row, at)]
    batch = pack_samples(rows)
    for name in ("input_ids", "position_ids", "predict_at", "targets", "target_sources"):
        batch[name] = batch[name].to(input_ids.device)
    return batch


def _check_ids(rows: Sequence[tuple[np.ndarray, np.ndarray]], vocabulary: int) -> None:
    for ids, labels in rows:
        for name, values in (("input_ids", ids), ("labels", labels[labels != IGNORE_INDEX])):
            if len(values) and not 0 <= values.min() <= values.max() < vocabulary:
                raise RecipeError(
                    f"data: {name} of a batch reach from {values.min()} to {values.max()}, and the model has the ids 0 "
                    f"to {vocabulary - 1}; tokenize with the tokenizer of the model, and give {IGNORE_INDEX} as the "
                    "label of what is not supervised"
                )


def _samples_of_row(ids: np.ndarray, labels: np.ndarray, positions: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Samples of a row that was packed without padding, as by transformers' ``DataCollatorWithFlattening``."""
    starts, count = np.flatnonzero(positions == 0), len(positions)
    own = np.arange(count) - np.repeat(starts, np.diff([*starts, count])) if starts[:1] == [0] else None
    if own is None or not np.array_equal(positions, own) or (count > 1 and len(starts) == count):
        raise RecipeError(
            f"data: position_ids of a row are {positions[:8].tolist()}...; those of a sample must be 0, 1, 2, ... "
            "without gaps, as CausalLM numbers them itself: leave position_ids out"
        )
    return list(zip(np.split(ids, starts[1:]), np.split(labels, starts[1:]), strict=True))


class TokenLoss(NamedTuple):
    """Loss and accuracy of the n supervised tokens of a packed batch."""

    loss_sum: Tensor
    """Scalar, fp32: cross-entropy summed over the tokens, in nats."""
    correct: Tensor
    """Scalar, int64: number of tokens whose highest logit is that of the target."""
    per_token: Tensor
    """``(n,)``, fp32: cross-entropy of each token, in nats; without gradient."""
