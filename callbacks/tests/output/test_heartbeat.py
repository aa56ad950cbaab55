"""Lines about long work: at intervals, with its time, and none after its end or about short work."""

import threading
import time

import pytest
from lit_callbacks.output import heartbeat as heartbeats
from lit_callbacks.output.heartbeat import heartbeat


def test_lines_while_it_lasts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(heartbeats, "SECONDS_BETWEEN_LINES", 0.01)
    caplog.set_level("INFO")
    with heartbeat("reading"):
        deadline = time.monotonic() + 10
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    count = len(caplog.messages)
    time.sleep(0.05)
    assert len(caplog.messages) == count >= 2
    assert set(caplog.messages) == {"reading: 0 s so far"}


def test_short_work_and_errors_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    before = threading.active_count()
    with pytest.raises(OSError, match="full"), heartbeat("writing"):
        raise OSError("full")
    assert threading.active_count() == before
    assert caplog.messages == []
