"""What a batch holds: samples, and tokens by what they count for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Number = float | Tensor
"""A tensor where the count is on the device: it is read when it is logged, not before."""
IGNORE_INDEX = -100
"""Label of a token without loss, as ``torch.nn.CrossEntropyLoss`` has it."""


@dataclass(frozen=True)
class BatchCounts:
    """Counts of one batch on this rank; None is unknown."""

    samples: Number | None = None
    total_tokens: Number | None = None
    """Padding included."""
    non_padding_tokens: Number | None = None
    supervised_tokens: Number | None = None
    """Tokens that are predicted and have a label."""
    head_positions: Number | None = None
    """Positions that the output head is computed for."""
    lengths: Sequence[int] | Tensor | None = None
    """Of the samples that attention keeps apart, padding left out."""

    def pairs(self, window: int | None) -> Number:
        """Query-key pairs: the sum over samples of length times length, or times ``window`` where that is less."""
        lengths = self.lengths
        if isinstance(lengths, Tensor):
            return (lengths * (lengths if window is None else lengths.clamp(max=window))).sum()
        return sum(n * (n if window is None else min(n, window)) for n in lengths or ())


def count_batch(batch: Any) -> BatchCounts:
    """Count a batch without asking the device for a number.

    Three kinds are known: a padded batch in Hugging Face's convention (``input_ids``, and where it has them
    ``attention_mask`` and unshifted ``labels``), a row of samples end to end (``input_ids``, ``segment_lengths``,
    ``targets``: the head is computed for those alone), and any other batch, whose samples are the first dimension of
    its first tensor.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        first = _first_tensor(batch)
        return BatchCounts(samples=None if first is None or first.ndim == 0 else first.shape[0])
    ids = batch["input_ids"]
    if "segment_lengths" in batch:
        segments = list(batch["segment_lengths"])
        targets = len(batch["targets"]) if "targets" in batch else None
        positions = ids.numel() if targets is None else targets
        return BatchCounts(len(segments), ids.numel(), ids.numel(), targets, positions, segments)
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    width = ids.shape[-1]
    samples = ids.numel() // max(width, 1)
    lengths = [width] * samples if mask is None else mask.sum(-1)
    real = ids.numel() if mask is None else mask.sum()
    # The first token of a sample is predicted by nothing.
    supervised = None if not isinstance(labels, Tensor) else (labels[..., 1:] != IGNORE_INDEX).sum()
    return BatchCounts(samples, ids.numel(), real, supervised, real, lengths)


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
