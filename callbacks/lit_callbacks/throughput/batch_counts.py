"""Counts of a batch: samples, and total, non-padding and supervised tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lit_callbacks.batch_tokens import IGNORE_INDEX, per_token
from lit_callbacks.protocols import SharesTokens

Number = float | Tensor
"""A count; a tensor if it is on the device, which is read when it is logged and not before."""


@dataclass(frozen=True)
class BatchCounts:
    """Counts of one batch on this rank; None is unknown."""

    samples: Number | None = None
    total_tokens: Number | None = None
    """Number of tokens, padding included."""
    non_padding_tokens: Number | None = None
    supervised_tokens: Number | None = None
    """Number of tokens that are predicted and have a label."""
    head_positions: Number | None = None
    """Number of positions for which the output head is computed."""
    lengths: Sequence[int] | Tensor | None = None
    """Lengths in tokens, without padding, of the samples that attention keeps apart."""
    own_lengths: Sequence[int] | None = None
    """Those of their tokens that are computed, where samples share first tokens, which are computed once."""

    @property
    def computed_tokens(self) -> Number | None:
        """Number of tokens, without padding, that the layers compute."""
        return self.non_padding_tokens if self.own_lengths is None else sum(self.own_lengths)

    def pairs(self, window: int | None) -> Number:
        """Number of query-key pairs: the sum over samples of length times length, or times ``window`` if that is less.

        ``window`` is the width of sliding-window attention in tokens, or None.
        """
        lengths = self.lengths
        if self.own_lengths is not None and lengths is not None:
            each = zip(self.own_lengths, lengths, strict=True)
            return sum(own * (n if window is None else min(n, window)) for own, n in each)
        if isinstance(lengths, Tensor):
            return (lengths * (lengths if window is None else lengths.clamp(max=window))).sum()
        return sum(n * (n if window is None else min(n, window)) for n in lengths or ())


def count_batch(batch: object) -> BatchCounts:
    """Count a batch without a synchronization with the device.

    Three kinds are known: a padded batch in the Hugging Face convention (``input_ids``, and optionally
    ``attention_mask`` and unshifted ``labels``), a packed batch (``input_ids``, ``segment_lengths``, ``targets``: the
    head is computed for the targets only; with ``pairs``, a sample is one of these, and one or two segments; with
    ``shared_prefixes``, tokens that samples share are counted for each, and computed once; with a true ``is_dummy`` it
    only keeps a rank in step with others, and nothing of it counts), and any other batch, whose number of samples is
    the first dimension of its first tensor that is no scalar. A mask that is not one of tokens (``(samples, 1, T, T)``)
    leaves the padding unknown; labels of samples, or of a decoder, leave the supervised tokens unknown.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        first = _first_tensor(batch)
        return BatchCounts(samples=None if first is None else first.shape[0])
    ids = batch["input_ids"]
    if batch.get("is_dummy") is True:
        return BatchCounts(0, 0, 0, 0, 0, [])
    if "segment_lengths" in batch:
        segments = list(batch["segment_lengths"])
        targets = len(batch["targets"]) if "targets" in batch else None
        positions = ids.numel() if targets is None else targets
        samples, shared = len(batch.get("pairs", segments)), batch.get("shared_prefixes")
        own = shared.own_lengths if isinstance(shared, SharesTokens) and shared.is_used else None
        return BatchCounts(samples, ids.numel(), ids.numel(), targets, positions, segments, own)
    mask, labels = per_token(batch, "attention_mask"), per_token(batch, "labels")
    width = ids.shape[-1]
    samples = ids.numel() // max(width, 1)
    # The first token of a sample is not predicted.
    supervised = None if labels is None else (labels[..., 1:] != IGNORE_INDEX).sum()
    if mask is not None:
        lengths = mask.bool().sum(-1)
        return BatchCounts(samples, ids.numel(), lengths.sum(), supervised, lengths.sum(), lengths)
    if batch.get("attention_mask") is not None:
        return BatchCounts(samples, ids.numel(), supervised_tokens=supervised)
    return BatchCounts(samples, ids.numel(), ids.numel(), supervised, ids.numel(), [width] * samples)


def _first_tensor(batch: object) -> Tensor | None:
    """First tensor of at least one dimension within mappings, lists and tuples."""
    if isinstance(batch, Tensor):
        return batch if batch.ndim > 0 else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((first for part in parts if (first := _first_tensor(part)) is not None), None)
