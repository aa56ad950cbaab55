"""A line of the checks is not said a second time."""

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.run.repeated_lines import without_repetitions


def test_one_repetition_of_a_line_is_dropped_until_the_next_checks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    with without_repetitions():
        for text in ("first", "second", "second"):
            rank_zero_info(text)
    for text in ("first", "second", "third", "first", "second", "second"):
        rank_zero_info(text)
    assert caplog.messages == ["first", "second", "second", "third", "first", "second"]
    with without_repetitions():
        rank_zero_info("fourth")
    caplog.clear()
    for text in ("first", "fourth", "fourth"):
        rank_zero_info(text)
    assert caplog.messages == ["first", "fourth"]
