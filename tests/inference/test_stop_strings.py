"""Stop strings over any cut of a text: the text before the first one, and never a part of one."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_ft.inference.stop_strings import StopStrings


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text("ab\n", max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_any_cut_shows_the_text_before_the_first_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    filtered, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += filtered.add(piece)
        if filtered.found:
            break
    else:
        shown += filtered.end()
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    assert filtered.found == bool(ends)
    if len(stops) <= 1 or not ends:
        assert shown == text[: min(ends, default=len(text))]
    assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize(("piece", "shown"), [("one <", "one "), ("one <|e", "one "), ("one <|x", "one <|x")])
def test_the_beginning_of_a_stop_is_held_back(piece: str, shown: str) -> None:
    assert StopStrings(["<|end|>"]).add(piece) == shown


def test_no_more_of_a_stop_is_compared_than_there_is_text() -> None:
    class Counted(str):
        cuts = 0

        def __getitem__(self, key: Any) -> str:
            Counted.cuts += 1
            return super().__getitem__(key)

    filtered = StopStrings([Counted("x" * 1_000)])
    assert [filtered.add("ab"), filtered.add("xx"), filtered.end()] == ["ab", "", "xx"]
    assert Counted.cuts == 4
