"""Measures of the readability of a code base.

    python -m benchmarks.code_measures
    python -m benchmarks.code_measures ../torchtitan/torchtitan --tests ../torchtitan/tests

Without a folder it measures ``lit_ft`` and ``lit_callbacks`` of this repository, else the given folders. Everything is
counted on syntax trees: nothing is imported.
"""

import argparse
import ast
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
OURS = [REPOSITORY / "lit_ft", REPOSITORY / "callbacks" / "lit_callbacks"]
BENCHMARKS = REPOSITORY / "benchmarks"
OUR_TESTS = [REPOSITORY / "tests", REPOSITORY / "callbacks" / "tests"]
SCENARIOS = "scenarios"
"""Folder of tests that cover several modules, which are named after a situation."""
LONG_FUNCTION = 50


@dataclass(frozen=True)
class Module:
    """A file and its syntax tree."""

    path: Path
    lines: int
    tree: ast.Module


@dataclass(frozen=True)
class Measures:
    """Counts of one package."""

    modules: int
    lines: int
    most_side_by_side: int
    fullest_folder: str
    functions: int
    median_function_lines: float
    long_functions: int
    longest_class: str
    longest_class_lines: int
    any_per_thousand: float
    probed_names: int
    probes_per_thousand: float
    documented: float


def read(folder: Path) -> list[Module]:
    """Parse the Python files of a folder, in the order of their paths."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    return [Module(path, len(text.splitlines()), ast.parse(text)) for path, text in texts]


def measure(folder: Path) -> Measures:
    """Measure one package.

    Args:
        folder: root of the package.

    Raises:
        ValueError: the folder has no Python file.
    """
    modules = read(folder)
    if not modules:
        raise ValueError(f"{folder} holds no Python file; name the folder of a package")
    lines = sum(module.lines for module in modules)
    folders = Counter(module.path.parent for module in modules)
    fullest, most = folders.most_common(1)[0]
    nodes = [node for module in modules for node in ast.walk(module.tree)]
    lengths = [_length(node) for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = {node.name: _length(node) for node in nodes if isinstance(node, ast.ClassDef)}
    longest = max(classes, key=lambda name: classes[name], default="none")
    probes = [name for node in nodes if (name := _probed(node)) is not None]
    public = list(_public(modules))
    return Measures(
        modules=len(modules),
        lines=lines,
        most_side_by_side=most,
        fullest_folder=str(fullest.relative_to(folder.parent)),
        functions=len(lengths),
        median_function_lines=statistics.median(lengths) if lengths else 0,
        long_functions=sum(length > LONG_FUNCTION for length in lengths),
        longest_class=longest,
        longest_class_lines=classes.get(longest, 0),
        any_per_thousand=1000 * sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes) / lines,
        probed_names=len(set(probes)),
        probes_per_thousand=1000 * len(probes) / lines,
        documented=sum(ast.get_docstring(node) is not None for node in public) / max(1, len(public)),
    )


def modules_named_after_their_subject(tests: Sequence[Path], packages: Sequence[Path]) -> tuple[int, int]:
    """Number of test modules whose name begins with that of a module or folder, and number of all test modules.

    Args:
        tests: folders of test modules; those under ``scenarios`` are not counted.
        packages: folders of the code.
    """
    paths = [path for package in packages for path in package.rglob("*.py")]
    names = {path.stem for path in paths} | {path.parent.name for path in paths}
    modules = [path for folder in tests for path in folder.rglob("test_*.py") if SCENARIOS not in path.parts]
    stems = [path.stem.removeprefix("test_") for path in modules]
    named = [stem for stem in stems if any(stem == name or stem.startswith(f"{name}_") for name in names)]
    return len(named), len(modules)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _probed(node: ast.AST) -> str | None:
    """Attribute name in ``getattr(x, "name", default)`` or ``hasattr(x, "name")``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
        return None
    is_probe = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
    name = node.args[1]
    return name.value if is_probe and isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def _public(modules: Sequence[Module]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for module in modules:
        for node in module.tree.body:
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            if isinstance(node, kinds) and not node.name.startswith("_"):
                yield node


def table(measured: dict[str, Measures]) -> str:
    """Markdown table of the measures, one column per package."""
    rows = {
        "modules, lines": [f"{m.modules}, {m.lines:,}" for m in measured.values()],
        "modules beside each other, at most": [
            f"{m.most_side_by_side} ({m.fullest_folder})" for m in measured.values()
        ],
        "functions, median lines": [f"{m.functions:,}, {m.median_function_lines:g}" for m in measured.values()],
        f"functions over {LONG_FUNCTION} lines": [f"{m.long_functions / m.functions:.1%}" for m in measured.values()],
        "longest class, lines": [f"{m.longest_class}, {m.longest_class_lines}" for m in measured.values()],
        "Any per 1,000 lines": [f"{m.any_per_thousand:.1f}" for m in measured.values()],
        "attribute names probed by string; probes per 1,000 lines": [
            f"{m.probed_names}; {m.probes_per_thousand:.1f}" for m in measured.values()
        ],
        "public names documented": [f"{m.documented:.0%}" for m in measured.values()],
    }
    lines = [f"| | {' | '.join(measured)} |", "|---" * (len(measured) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(values)} |" for name, values in rows.items())])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="packages; none is this repository's")
    parser.add_argument("--tests", nargs="*", type=Path, help="their folders of tests")
    options = parser.parse_args()
    folders = options.folders or OURS
    tests = options.tests if options.folders else OUR_TESTS
    print(table({folder.resolve().name: measure(folder.resolve()) for folder in folders}))
    if tests:
        packages = options.folders or [*OURS, BENCHMARKS]
        named, count = modules_named_after_their_subject(tests, packages)
        print(f"\ntest modules that carry the name of what they test: {named} of {count}")


if __name__ == "__main__":
    main()
