"""Tables that a report shows."""

from pathlib import Path

import pytest
from lit_callbacks.report.tables import ReportTable, newest_tables, read_table


def table(title: str) -> ReportTable:
    return ReportTable(
        title, "python -m x", "2026-11-23T08:00:00", ["task", "value"], [["a", 0.5], ["b", None]], ["note"]
    )


def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = table("scores").write(tmp_path, "evaluation")
    assert path == tmp_path / "tables" / "evaluation-1.json"
    assert read_table(path) == table("scores")


def test_the_newest_of_each_kind_is_shown_and_none_is_overwritten(tmp_path: Path) -> None:
    for number in range(11):
        table(f"scores {number}").write(tmp_path, "evaluation")
    table("server").write(tmp_path, "parity")
    found = newest_tables(tmp_path)
    assert {kind: path.name for kind, path in found.items()} == {
        "evaluation": "evaluation-11.json",
        "parity": "parity-1.json",
    }
    assert len(list((tmp_path / "tables").iterdir())) == 12
    assert newest_tables(tmp_path / "absent") == {}


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        ReportTable("scores", "", "", ["task", "value"], [["a"]])


def test_a_file_that_holds_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x-1.json"
    path.write_text('{"title": "a"}')
    with pytest.raises(ValueError, match=r"x-1\.json holds no table"):
        read_table(path)
