"""Lines of Lightning's ``metrics.csv``, whose steps are counted in two ways."""

from collections.abc import Mapping

_MONITORS = ("lr-", "DeviceStatsMonitor.")
"""How names begin that Lightning's ``LearningRateMonitor`` and ``DeviceStatsMonitor`` log."""


def counts_from_zero(row: Mapping[str, str]) -> bool:
    """Whether the first step of a line is 0, as Lightning counts: such lines have an epoch, or are its monitors'.

    Callbacks that log by themselves use the number of completed steps.

    Args:
        row: values by column; empty ones may be left out.
    """
    names = [name for name, value in row.items() if value and name != "step"]
    return "epoch" in names or (bool(names) and all(name.startswith(_MONITORS) for name in names))
