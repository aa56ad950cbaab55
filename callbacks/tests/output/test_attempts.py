"""Errors of what a callback measures or writes become warnings, each once."""

import pytest
from lit_callbacks.output.attempts import Attempts, written


def test_an_error_is_one_warning_and_the_result_is_none(recwarn: pytest.WarningsRecorder) -> None:
    attempts = Attempts("Meter")
    assert attempts.result("cannot count", lambda: 3) == 3
    assert attempts.result("cannot count", lambda: {}["tokens"]) is None
    assert attempts.result("cannot count", lambda: [][0]) is None
    assert [str(warning.message) for warning in recwarn] == ["Meter: cannot count (KeyError: 'tokens')"]


def test_a_warning_with_values_appears_once_by_its_kind(recwarn: pytest.WarningsRecorder) -> None:
    attempts = Attempts("Meter")
    for grown in (1, 2):
        attempts.warn(f"grew by {grown} MiB", kind="leak")
        attempts.warn("no picture")
    assert [str(warning.message) for warning in recwarn] == ["Meter: grew by 1 MiB", "Meter: no picture"]


def test_what_cannot_be_written_is_a_warning_and_other_errors_are_raised() -> None:
    def fail(error: Exception) -> None:
        raise error

    assert written("no file; give path=", lambda: None)
    with pytest.warns(UserWarning, match=r"^no file; give path= \(disk full\)$"):
        assert not written("no file; give path=", lambda: fail(OSError("disk full")))
    with pytest.raises(ValueError, match="wrong"):
        written("no file; give path=", lambda: fail(ValueError("wrong")))
