"""The tokenised data set: flat arrays that cost eight bytes a token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lit_ft.errors import RecipeError
from lit_ft.rows import IGNORE_INDEX

Overlong = Literal["truncate", "drop", "error"]


@dataclass(frozen=True)
class Samples:
    """Token ids and labels of all samples, laid end to end."""

    ids: np.ndarray
    """``(tokens,)``, int32."""
    labels: np.ndarray
    """``(tokens,)``, int32, unshifted; ``IGNORE_INDEX`` where not supervised."""
    offsets: np.ndarray
    """``(samples + 1,)``, int64: sample i is ``offsets[i]:offsets[i + 1]``."""
    lengths: np.ndarray = field(init=False)
    """``(samples,)``, tokens per sample."""
    supervised: np.ndarray = field(init=False)
    """``(samples,)``, targets per sample; a sample's first token is never one."""

    def __post_init__(self) -> None:
        is_target = self.labels != IGNORE_INDEX
        is_target[self.offsets[:-1]] = False
        cumulative = np.concatenate([[0], np.cumsum(is_target)])
        object.__setattr__(self, "lengths", np.diff(self.offsets))
        object.__setattr__(self, "supervised", np.diff(cumulative[self.offsets]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.ids[part], self.labels[part]


def collect(tokenized: Sequence[tuple[np.ndarray, np.ndarray]]) -> Samples:
    """Lay tokenised conversations end to end."""
    lengths = [len(ids) for ids, _ in tokenized]
    empty = [np.zeros(0, dtype=np.int32)]
    return Samples(
        ids=np.concatenate([ids for ids, _ in tokenized] or empty),
        labels=np.concatenate([labels for _, labels in tokenized] or empty),
        offsets=np.cumsum([0, *lengths]),
    )


def fit_to_length(
    tokenized: Sequence[tuple[np.ndarray, np.ndarray]], max_length: int | None, overlong: Overlong, path: str
) -> tuple[list[int], Samples, list[str]]:
    """Apply ``max_length`` and leave out what has nothing to learn from.

    Returns:
        The indices of the rows that stay, their samples, and a line for each thing that was done.

    Raises:
        RecipeError: nothing supervised is left, or a row is too long and ``overlong`` is ``error``.
    """
    limit = max_length if max_length is not None else max((len(ids) for ids, _ in tokenized), default=0)
    too_long = [i for i, (ids, _) in enumerate(tokenized) if len(ids) > limit]
    lines = []
    if too_long:
        if overlong == "error":
            longest = max(len(ids) for ids, _ in tokenized)
            raise RecipeError(
                f"{path}, row {too_long[0] + 1}: {len(tokenized[too_long[0]][0])} tokens are over "
                f"data.max_length={max_length} ({len(too_long)} such rows); raise it to {longest} or set "
                "data.overlong to truncate or drop"
            )
        deed = {"truncate": "were cut at the end", "drop": "were dropped"}[overlong]
        lines.append(
            f"{path}: {len(too_long):,} of {len(tokenized):,} rows are longer than data.max_length={max_length} "
            f"tokens and {deed} (data.overlong={overlong})"
        )
    dropped = set(too_long) if overlong == "drop" else set()
    cut = {i: (ids[:limit], labels[:limit]) for i, (ids, labels) in enumerate(tokenized) if i not in dropped}
    kept = [i for i, (_, labels) in cut.items() if (labels[1:] != IGNORE_INDEX).any()]
    if len(kept) < len(cut):
        lines.append(
            f"{path}: {len(cut) - len(kept):,} of {len(tokenized):,} rows had no supervised token left and were dropped"
        )
    if not kept:
        raise RecipeError(
            f"{path}: not one of {len(tokenized):,} rows has a supervised token within data.max_length={max_length}; "
            f"the longest row has {max(len(ids) for ids, _ in tokenized):,} tokens: raise it"
        )
    return kept, collect([cut[i] for i in kept]), lines
