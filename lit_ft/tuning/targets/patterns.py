"""``rank_pattern`` and ``alpha_pattern`` of LoRA: ranks and alphas of layers whose names regular expressions match."""

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils.other import get_pattern_key

_OPTIONS = ("rank_pattern", "alpha_pattern")


def extend_to_parameters(peft: LoraConfig, layers: Iterable[str]) -> None:
    """Let patterns hold for linear layers that are given to PEFT as parameters, which it knows by other names.

    ``peft`` is changed in place.
    """
    names = list(layers)
    for option in _OPTIONS:
        patterns = getattr(peft, option) or {}
        keys = {name: get_pattern_key(list(patterns), name) for name in names}
        extended = {of_parameter(name): patterns[key] for name, key in keys.items() if key in patterns}
        setattr(peft, option, extended | patterns)  # PEFT takes the first that matches


def of_parameter(layer: str) -> str:
    """Pattern of one linear layer that is given as a parameter."""
    return re.escape(f"{layer}.weight")


@contextmanager
def without_warnings_of_peft(peft: PeftConfig) -> Iterator[None]:
    """Context without PEFT's warning of patterns that match nothing where it overlooks parameters (peft 0.21)."""
    with warnings.catch_warnings():
        if getattr(peft, "target_parameters", None):
            warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match")
        yield


def warn_of_unmatched(model: PeftModel) -> None:
    """Name patterns that match no layer and no parameter, in place of the warning that is left out."""
    peft = model.active_peft_config
    if not getattr(peft, "target_parameters", None):
        return
    tuner = model.base_model
    names: list[str] = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    for option in _OPTIONS:
        patterns = getattr(peft, option) or {}
        layers = [n.removesuffix(".weight") for n in names if of_parameter(n.removesuffix(".weight")) in patterns]
        if unmatched := [p for p in patterns if all(get_pattern_key([p], n) != p for n in (*names, *layers))]:
            rank_zero_warn(f"model.peft: {option} {unmatched} match no layer that is adapted; correct or remove them")
