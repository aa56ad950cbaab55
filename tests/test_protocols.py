"""Protocols that objects are compared with at run time."""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def test_no_protocol_names_weights_or_modules() -> None:
    """``isinstance`` finds parameters and modules within an ``nn.Module`` up to Python 3.11 only."""
    files = [*REPOSITORY.glob("lit_ft/**/*.py"), *REPOSITORY.glob("callbacks/lit_callbacks/**/*.py")]
    protocols = {
        node.name: [ast.unparse(one.annotation) for one in node.body if isinstance(one, ast.AnnAssign)]
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and "runtime_checkable" in map(ast.unparse, node.decorator_list)
    }
    assert protocols["TrainsFromSpec"] == ["TrainingSpec"]
    held = {"Tensor", "Parameter", "nn.Parameter", "Module", "nn.Module"}
    assert [name for name, annotations in protocols.items() if held.intersection(annotations)] == []
