"""Samples of batches, and which of their tokens are supervised."""

from typing import Any

import pytest
import torch
from lit_callbacks.batch_tokens import batch_tokens, has_labels

IDS = torch.tensor([[5, 6, 7, 8, 9]])
LABELS = torch.tensor([[5, -100, 7, 8, 9]])

BATCHES: dict[str, tuple[Any, Any]] = {
    "padded": (
        {
            "input_ids": torch.tensor([[5, 6, 0], [0, 7, 8]]),
            "labels": torch.tensor([[5, 6, -100], [-100, -100, 8]]),
            "attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1]]),
        },
        # The first token is never predicted.
        [([5, 6], [False, True]), ([7, 8], [False, True])],
    ),
    "packed by positions": (
        {"input_ids": IDS, "labels": LABELS, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
        [([5, 6], [False, False]), ([7, 8, 9], [False, True, True])],
    ),
    "packed by lengths": (
        {"input_ids": IDS, "segment_lengths": [2, 3], "predict_at": torch.tensor([0, 2, 3])},
        [([5, 6], [False, True]), ([7, 8, 9], [False, True, True])],
    ),
    "positions of left padding": (
        {
            "input_ids": torch.tensor([[0, 0, 5, 6]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1]]),
            "position_ids": torch.tensor([[0, 0, 0, 1]]),
        },
        [([5, 6], [False, False])],
    ),
    "positions of another shape": (
        {"input_ids": IDS, "position_ids": torch.zeros(3, 1, 5)},
        [([5, 6, 7, 8, 9], [False] * 5)],
    ),
    "only padding": ({"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}, []),
}


@pytest.mark.parametrize("name", BATCHES)
def test_samples_of_a_batch(name: str) -> None:
    batch, expected = BATCHES[name]
    assert [tuple(sample) for sample in batch_tokens(batch)] == expected


def test_labels_are_optional() -> None:
    assert [has_labels(BATCHES[name][0]) for name in ("padded", "packed by lengths", "only padding")] == [
        True,
        True,
        False,
    ]
