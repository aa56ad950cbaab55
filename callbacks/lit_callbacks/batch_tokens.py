"""Token ids of the samples of a batch, and which of them are supervised."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token without loss, the default of ``torch.nn.CrossEntropyLoss``."""


class SampleTokens(NamedTuple):
    """Tokens of a sample, without padding."""

    ids: list[int]
    supervised: list[bool]
    """Whether the model is trained to predict each token."""


def has_labels(batch: Mapping[str, Any]) -> bool:
    """Whether a batch says which of its tokens are supervised."""
    return per_token(batch, "labels") is not None or isinstance(batch.get("predict_at"), Tensor)


def batch_tokens(batch: Mapping[str, Any]) -> list[SampleTokens]:
    """Samples of a batch of token ids; waits for the device.

    A batch has ``input_ids``, ``(rows, T)``, and optionally ``attention_mask``, and labels: ``labels``, unshifted, or
    ``predict_at``, the positions whose next token is supervised. A row holds several samples where there are
    ``segment_lengths``, or where ``position_ids`` restart at 0. The first token of a sample is never supervised.
    """
    ids = batch["input_ids"]
    mask = per_token(batch, "attention_mask")
    columns = (ids, torch.ones_like(ids) if mask is None else mask, _is_supervised(batch), _is_first(batch))
    samples: list[SampleTokens] = []
    for row in zip(*(column.tolist() for column in columns), strict=True):
        begins = True
        for token, is_real, is_supervised, is_first in zip(*row, strict=True):
            if not is_real:
                continue
            if begins or is_first:
                samples.append(SampleTokens([], []))
            samples[-1].supervised.append(bool(is_supervised) and bool(samples[-1].ids))
            samples[-1].ids.append(token)
            begins = False
    return samples


def per_token(batch: Mapping[str, Any], key: str) -> Tensor | None:
    """Entry of a batch with one value per token, ``(rows, T)``; None where there is none."""
    value = batch.get(key)
    return value if isinstance(value, Tensor) and value.shape == batch["input_ids"].shape else None


def _is_supervised(batch: Mapping[str, Any]) -> Tensor:
    """Whether each token has a label, ``(rows, T)``, bool."""
    if (labels := per_token(batch, "labels")) is not None:
        return labels != IGNORE_INDEX
    supervised = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    if isinstance(at := batch.get("predict_at"), Tensor):
        supervised.view(-1)[at + 1] = True
    return supervised


def _is_first(batch: Mapping[str, Any]) -> Tensor:
    """Whether a sample begins with each token, as far as the batch says, ``(rows, T)``, bool."""
    ids = batch["input_ids"]
    first = torch.zeros_like(ids, dtype=torch.bool)
    if "segment_lengths" in batch:
        starts = list(accumulate(int(length) for length in batch["segment_lengths"]))[:-1]
        first.view(-1)[torch.tensor(starts, dtype=torch.int64, device=ids.device)] = True
    elif (positions := per_token(batch, "position_ids")) is not None:
        first = positions == 0
    return first
