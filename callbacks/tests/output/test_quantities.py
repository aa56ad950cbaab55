"""Numbers, times and sizes as text."""

import math

import pytest
from lit_callbacks.output.quantities import as_count, as_number, as_time


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.000123456, "0.0001235"), (4.91e-06, "4.91e-06"), (12.3456, "12.35"), (999.96, "1,000"), (0.0, "0")),
        *((10_320.4, "10,320"), (-17_724.0, "-17,724"), (1e15, "1e+15"), (float("nan"), "nan"), (float("inf"), "inf")),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert as_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (3960, "1 h 6 min"), (90_000, "1 d 1 h")],
)
def test_times(seconds: float, text: str) -> None:
    assert as_time(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 steps"), (1, "1 step"), (2400, "2,400 steps"), (math.inf, "inf steps")]
)
def test_counts(number: float, text: str) -> None:
    assert as_count(number, "step") == text
