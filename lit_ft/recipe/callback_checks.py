"""Checks of a recipe's callbacks before training: what they monitor is logged, and what they write has a file name."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lit_ft.errors import RecipeError
from lit_ft.training.metrics import metric_names


def check_callbacks(callbacks: Iterable[Callback], has_validation: bool) -> None:
    """Refuse a ``ModelCheckpoint`` or ``EarlyStopping`` that would end the run at its first look.

    Args:
        callbacks: callbacks of the trainer.
        has_validation: whether there is validation data, and the trainer looks at it.

    Raises:
        RecipeError: a metric that ``CausalLM`` does not log is monitored, or a file name would be a folder.
    """
    for callback in callbacks:
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor is not None:
            _check_monitor(callback.monitor, type(callback).__name__, has_validation)
        if isinstance(callback, ModelCheckpoint) and callback.auto_insert_metric_name:
            _check_filename(callback.filename or "")


def _check_monitor(monitor: str, who: str, has_validation: bool) -> None:
    known = [name for split in ("train", "val") for name in metric_names(split)]
    split, _, rest = monitor.partition("/")
    if split == "val" and not has_validation:
        raise RecipeError(
            f"trainer.callbacks: {who} monitors {monitor!r}, and there is no validation; set data.val_path or "
            "data.val_fraction, or monitor train/loss"
        )
    # Losses of sources, and what other callbacks and modules log, have names of their own.
    if monitor in known or rest.startswith("loss/") or (rest and split not in ("train", "val")):
        return
    near = get_close_matches(monitor, known, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}? " if near else ""
    raise RecipeError(
        f"trainer.callbacks: {who} monitors {monitor!r}, which is not logged; {advice}"
        f"There are {', '.join(name for name in known if has_validation or not name.startswith('val'))}"
    )


def _check_filename(filename: str) -> None:
    if (metric := re.search(r"\{(\w+/[^:}]*)[^}]*\}", filename)) is not None:
        better = filename.replace(metric[0], f"{metric[1].rpartition('/')[2]}={metric[0]}")
        raise RecipeError(
            f"trainer.callbacks: ModelCheckpoint's filename {filename!r} would be a folder, because the name "
            f"{metric[1]!r} is put before its value; write {better!r} with auto_insert_metric_name: false"
        )
