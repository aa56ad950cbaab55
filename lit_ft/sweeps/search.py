"""Choice of a trial's values by Optuna, from the results of the earlier trials alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lit_ft.errors import RecipeError
from lit_ft.sweeps.search_space import Range, Variation

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_ASKS = 100
"""Proposals of which the first that no earlier trial had is taken."""


def check_installed() -> None:
    """Check that Optuna is there, before any trial starts.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise RecipeError(
            "--trials needs the package optuna, which is not installed; pip install -e '.[sweep]', or leave out "
            "--trials for a grid"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def propose(
    variations: Sequence[Variation],
    earlier: Sequence[tuple[dict[str, str], float | None]],
    mode: Literal["min", "max"],
    seed: int,
) -> dict[str, str]:
    """Values of the next trial, by Optuna's TPE sampler (Watanabe 2023, arXiv:2304.11127).

    They depend on the arguments only: a sweep that is stopped and started again tries what an uninterrupted one does.

    Args:
        variations: varied options, with their values or ranges.
        earlier: values and result of each earlier trial, in order; None where it failed.
        mode: whether lower or higher results are better.
        seed: seed of the sweep.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    space = {variation.key: _distribution(variation) for variation in variations}
    sampler = optuna.samplers.TPESampler(seed=seed + len(earlier))
    study = optuna.create_study(direction="minimize" if mode == "min" else "maximize", sampler=sampler)
    for values, result in earlier:
        params = {
            v.key: type(v.values.low)(values[v.key]) if isinstance(v.values, Range) else values[v.key]
            for v in variations
        }
        state = TrialState.FAIL if result is None else TrialState.COMPLETE
        study.add_trial(create_trial(state=state, value=result, params=params, distributions=space))
    tried = [values for values, _ in earlier]
    for _ in range(_ASKS):
        params = study.ask(space).params
        proposal = {variation.key: _written(params[variation.key], variation.values) for variation in variations}
        if proposal not in tried:
            break
    return proposal


def _written(value: int | float | str, values: tuple[str, ...] | Range) -> str:
    """Value as in a recipe, with four significant digits and within its range."""
    if isinstance(values, Range) and isinstance(value, float):
        value = min(max(float(f"{value:.4g}"), values.low), values.high)
    return str(value)


def _distribution(variation: Variation) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    values = variation.values
    if not isinstance(values, Range):
        return CategoricalDistribution(values)
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.is_logarithmic)
    return FloatDistribution(values.low, values.high, log=values.is_logarithmic)
