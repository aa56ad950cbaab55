"""``benchmarks.code_measures``: counts worked out by hand, and the limits that this repository keeps."""

import ast
import inspect
from pathlib import Path

import pytest

from benchmarks import code_measures
from benchmarks.code_measures import measure, modules_named_after_their_subject
from lit_ft import CausalLM

CODE = '''from typing import Any


class Shelf:
    """Documented."""

    def find(self, book: Any) -> Any:
        return getattr(book, "title", None) or hasattr(book, "name") or getattr(book, "title", "")


def undocumented() -> None:
    pass
'''


def test_counts_of_a_small_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "room").mkdir(parents=True)
    for name in ("one", "two"):
        (package / "room" / f"{name}.py").write_text("VALUE = 1\n")
    (package / "shelf.py").write_text(CODE)
    found = measure(package)
    assert (found.modules, found.lines) == (3, 14)
    assert (found.most_side_by_side, found.fullest_folder) == (2, "package/room")
    assert (found.functions, found.median_function_lines, found.long_functions) == (2, 2, 0)
    assert (found.longest_class, found.longest_class_lines) == ("Shelf", 5)
    assert found.any_per_thousand == pytest.approx(1000 * 2 / 14)
    assert (found.probed_names, found.probes_per_thousand) == (2, pytest.approx(1000 * 3 / 14))
    assert found.documented == 0.5


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no Python file"):
        measure(tmp_path)


def test_this_repository_keeps_its_limits() -> None:
    for folder in code_measures.OURS:
        found = measure(folder)
        assert found.most_side_by_side <= 12, found.fullest_folder
        assert found.long_functions <= 0.006 * found.functions
        assert found.documented == 1.0
        assert found.any_per_thousand <= 12
        assert found.probes_per_thousand < 3
    assert len(inspect.getsource(CausalLM).splitlines()) <= 260
    named, count = modules_named_after_their_subject(
        code_measures.OUR_TESTS, [*code_measures.OURS, code_measures.BENCHMARKS]
    )
    assert named == count


def test_no_protocol_names_weights_or_modules() -> None:
    """``isinstance`` finds parameters and modules within an ``nn.Module`` up to Python 3.11 only."""
    repository = Path(code_measures.__file__).parents[1]
    files = [*repository.glob("lit_ft/**/*.py"), *repository.glob("callbacks/lit_callbacks/**/*.py")]
    protocols = {
        node.name: [ast.unparse(one.annotation) for one in node.body if isinstance(one, ast.AnnAssign)]
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and "runtime_checkable" in map(ast.unparse, node.decorator_list)
    }
    assert protocols["TrainsFromSpec"] == ["TrainingSpec"]
    held = {"Tensor", "Parameter", "nn.Parameter", "Module", "nn.Module"}
    assert [name for name, annotations in protocols.items() if held.intersection(annotations)] == []
