"""The first batch of a run as the model sees it: the texts of its tokens, and which are supervised.

The file holds the beginning of a large batch, and the two ends of a long sample.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

from torch import Tensor

from lit_callbacks.batch_tokens import SampleTokens, batch_tokens, has_labels
from lit_callbacks.output.token_pieces import ShownSample, show_sample
from lit_callbacks.report.report_data import FIRST_BATCH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_SAMPLES = 12
"""Maximum number of samples of the batch that are written."""
END_TOKENS = 160
"""Maximum number of tokens at either end of a sample that are written."""


class FirstBatch(TypedDict):
    """First batch of a run, of rank 0."""

    step: int
    """Optimizer steps before it: 0, or those of the checkpoint that the run resumed from."""
    samples: int
    pairs: int
    """Number of pairs of a chosen and a rejected answer, each two samples in this order, or one where an answer is
    missing; 0 in other data."""
    answers: list[str]
    """Of pairs, the kind of each shown sample: chosen or rejected."""
    tokens: int
    supervised: int
    has_labels: bool
    """Whether the batch says which tokens are supervised."""
    is_weighted: bool
    """Whether supervised tokens have factors in the loss, below 0 too (``target_weights``): the model's own answers."""
    shown: list[ShownSample]


def holds_tokens(batch: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a batch holds token ids: ``input_ids``, ``(rows, T)``."""
    return isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), Tensor) and ids.ndim == 2


def describe_batch(batch: Mapping[str, Any], step: int, tokenizer: "PreTrainedTokenizerBase") -> FirstBatch:
    """Describe a batch of token ids; waits for the device."""
    samples = batch_tokens(batch)
    shown = samples[:MOST_SAMPLES]
    return {
        "step": step,
        "samples": len(samples),
        "pairs": len(batch["pairs"]) if isinstance(batch.get("pairs"), Tensor) else 0,
        "answers": _answers(batch, shown) if "pairs" in batch else [],
        "tokens": sum(len(sample.ids) for sample in samples),
        "supervised": sum(sum(sample.supervised) for sample in samples),
        "has_labels": has_labels(batch),
        "is_weighted": isinstance(batch.get("target_weights"), Tensor),
        "shown": [show_sample(tokenizer, sample, END_TOKENS) for sample in shown],
    }


def _answers(batch: Mapping[str, Any], samples: Sequence[SampleTokens]) -> list[str]:
    """Kinds of the first samples of a batch of pairs, as ``target_answers`` says: even numbers are chosen answers."""
    numbers, at, kinds = batch["target_answers"].tolist(), 0, []
    for sample in samples:
        kinds.append("rejected" if numbers[at] % 2 else "chosen")
        at += sum(sample.supervised)
    return kinds


def write_first_batch(folder: Path, batch: FirstBatch) -> None:
    """Write the file.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FIRST_BATCH).write_text(json.dumps(batch, ensure_ascii=False) + "\n", encoding="utf-8")
