"""Proposals of Optuna."""

import pytest

from lit_ft.sweeps.search import propose
from lit_ft.sweeps.search_space import parse_variations

pytest.importorskip("optuna", reason="the extra `sweep` is not installed")


def test_proposals_approach_the_best_value_and_depend_on_earlier_results_alone() -> None:
    variations = parse_variations(["x=0.0..1.0", "n=1..3"])
    earlier: list[tuple[dict[str, str], float | None]] = [({"x": "0.5", "n": "2"}, None)]  # a failed trial
    for _ in range(30):
        values = propose(variations, earlier, "min", seed=1)
        assert values == propose(variations, earlier, "min", seed=1)
        earlier.append((values, (float(values["x"]) - 0.3) ** 2 + int(values["n"])))
    late = [values for values, _ in earlier[-10:]]
    assert sum(abs(float(values["x"]) - 0.3) for values in late) / 10 < 0.15
    assert sum(values["n"] == "1" for values in late) >= 7


def test_a_range_may_have_one_end_that_is_a_whole_number() -> None:
    variations = parse_variations(["optimizer.weight_decay=0..0.1"])
    earlier: list[tuple[dict[str, str], float | None]] = []
    for _ in range(4):
        earlier.append((propose(variations, earlier, "min", seed=0), 1.0))
    assert all(0 <= float(values["optimizer.weight_decay"]) <= 0.1 for values, _ in earlier)


def test_no_combination_is_proposed_twice() -> None:
    variations = parse_variations(["a=1,2", "b=x,y"])
    earlier: list[tuple[dict[str, str], float | None]] = []
    for _ in range(4):
        earlier.append((propose(variations, earlier, "max", seed=0), 1.0))
    assert len({tuple(values.values()) for values, _ in earlier}) == 4
