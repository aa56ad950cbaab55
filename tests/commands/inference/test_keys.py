"""Where the key of a server comes from."""

from pathlib import Path
from typing import Any

import pytest

from lit_ft.commands.inference.keys import given_key
from lit_ft.errors import RecipeError

VARIABLE = "LIT_FT_TEST_KEY"


def test_an_option_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("of-the-file\n")
    assert given_key("api_key", None, None, VARIABLE) is None
    monkeypatch.setenv(VARIABLE, "")
    assert given_key("api_key", None, None, VARIABLE) is None
    monkeypatch.setenv(VARIABLE, "of-the-environment")
    assert given_key("api_key", None, None, VARIABLE) == "of-the-environment"
    assert given_key("api_key", None, str(file), VARIABLE) == "of-the-file"
    assert given_key("api_key", "itself", None, VARIABLE) == "itself"


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        ("itself", b"key", "--api_key and --api_key_file both give a key"),
        (None, None, "cannot be read .*No such file"),
        (None, b"\xff\xfe", "cannot be read .*utf-8"),
        (None, b" \n", "gives no key"),
        (None, b"two\nlines", "gives no key"),
        (None, "schl\u00fcssel".encode(), "gives no key"),
    ],
)
def test_what_is_no_key_is_refused(tmp_path: Path, key: Any, content: bytes | None, message: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        given_key("api_key", key, str(file), VARIABLE)


def test_an_empty_option_is_no_open_server() -> None:
    with pytest.raises(RecipeError, match="--api_key gives no key"):
        given_key("api_key", "", None, VARIABLE)
