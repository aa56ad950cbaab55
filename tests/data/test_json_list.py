"""JSON lists parsed item by item: the same items and errors as of the document at once, in bounded memory."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from lit_ft import RecipeError
from lit_ft.data.text import json_list
from lit_ft.data.text.json_list import items_of_list

FILE = Path("a.json")
DOCUMENTS: list[Any] = [
    [],
    [1, -2.5e10, True, None, "x"],
    [{"a": "红杯子 🍵", "b": ['quote " and \\', "line\nend"]}, {"c": {}}, [[]]],
    [{"text": "word " * 50} for _ in range(7)],
]


@pytest.fixture(params=[1, 2, 3, 7, 64, 2**20])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(json_list, "_CHUNK_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_the_items_are_those_of_the_document(document: Any, style: Any, chunk_bytes: int) -> None:
    content = f"\n {json.dumps(document, **style)} \n".encode()
    assert list(items_of_list(FILE, io.BytesIO(content))) == document


def test_errors_are_where_the_document_has_them(chunk_bytes: int) -> None:
    text = json.dumps([{"a": "红\\", "b": [1, 2]}, {"c": None}], ensure_ascii=False, indent=1)
    errors = 0
    for i in range(1, len(text)):
        broken = text[:i] + text[i + 1 :]
        stream = io.BytesIO(broken.encode())
        if (expected := error_of(broken)) is None:
            assert list(items_of_list(FILE, stream)) == json.loads(broken)
            continue
        errors += 1
        with pytest.raises(RecipeError) as refused:
            list(items_of_list(FILE, stream))
        assert str(refused.value) == expected
    assert errors > 20


def error_of(document: str) -> str | None:
    try:
        json.loads(document)
    except json.JSONDecodeError as error:
        return f"a.json:{error.lineno}: is not JSON (column {error.colno}: {error.msg}); fix it"
    return None


def test_what_is_not_utf_8_is_found_at_its_byte(chunk_bytes: int) -> None:
    with pytest.raises(RecipeError, match=r"a\.json:2: is not UTF-8 \(byte 29\); convert"):
        list(items_of_list(FILE, io.BytesIO(b'[{"text": "a"},\n{"text": "caf\xe9"}]')))
    with pytest.raises(RecipeError, match=r"a\.json:1: is not UTF-8 \(byte 3\)"):
        list(items_of_list(FILE, io.BytesIO(b'["a\xe7\xba')))


class EndlessText(io.RawIOBase):
    """A list whose first item never ends."""

    def __init__(self) -> None:
        self.served = 0

    def read(self, size: int = -1) -> bytes:
        start = b'[{"text": "' if self.served == 0 else b""
        self.served += size
        return start + b"x" * (size - len(start))


def test_an_item_that_does_not_end_is_refused_before_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_list, "LONGEST_ROW_BYTES", 2**22)
    stream: Any = EndlessText()
    with pytest.raises(RecipeError, match=r"a\.json, row 1: is longer than 4 MiB, which is no row to train on"):
        list(items_of_list(FILE, stream))
    assert stream.served < 2**24


def test_a_row_is_there_before_the_next_is_read() -> None:
    stream = io.BytesIO(b'[{"a": 1}, ' + b'{"a": 2}, ' * 500_000)
    assert next(iter(items_of_list(FILE, stream))) == {"a": 1}
    assert stream.tell() <= 2**20
