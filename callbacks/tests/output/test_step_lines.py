"""JSONL files that a resumed run continues: dropped lines, damaged lines."""

from pathlib import Path

import pytest
from lit_callbacks.output.step_lines import add_lines, drop_after_step, read_lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "answers" / "samples.jsonl"
    add_lines(path, [{"step": step, "answer": f"step {step}\u2028"} for step in (0, 2, 4)])
    return path


@pytest.mark.parametrize(("step", "left"), [(4, [0, 2, 4]), (3, [0, 2]), (0, [])])
def test_lines_after_the_step_are_dropped(file: Path, step: int, left: list[int]) -> None:
    drop_after_step(file, step)
    assert [line["step"] for line in read_lines(file)] == left
    assert [path.name for path in file.parent.iterdir()] == ["samples.jsonl"]


@pytest.mark.parametrize("line", [b'\x00\x00"step": 2}', b'{"step": 2, "answer": "\xff"}', b'{"answer": 1}', b"[2]"])
def test_a_damaged_line_is_left_out_and_kept_beside(file: Path, line: bytes) -> None:
    written = file.read_bytes().split(b"\n")
    written[1] = line
    file.write_bytes(b"\n".join(written))
    before = file.read_bytes()
    with pytest.warns(UserWarning, match="1 of 3 lines are damaged and left out; .* kept as 'samples.jsonl.damaged'"):
        drop_after_step(file, 4)
    assert [line["step"] for line in read_lines(file)] == [0, 4]
    assert file.with_name("samples.jsonl.damaged").read_bytes() == before
