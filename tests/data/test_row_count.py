"""A count of rows is a line at intervals, or is drawn on a terminal."""

import io
import logging

import pytest

from lit_ft.data.tokens import row_count
from lit_ft.data.tokens.row_count import RowCount


def test_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    with RowCount("rows.json") as count:
        count.add(500)
        monkeypatch.setattr(row_count, "SECONDS_BETWEEN_LINES", 0)
        count.add(700)
    assert caplog.messages == ["tokenizing rows.json: 1,200 rows"]


def test_on_a_terminal(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    caplog.set_level(logging.INFO)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(row_count, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setenv("TERM", "xterm")
    with RowCount("rows.json") as count:
        count.add(1_500)
    assert "tokenizing rows.json: 1,500 rows" in screen.getvalue()
    assert not caplog.messages
