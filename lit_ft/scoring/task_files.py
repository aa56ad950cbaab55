"""Checks of a task's YAML file, which may have been downloaded, before lm-evaluation-harness reads it."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from lit_ft.errors import RecipeError
from lit_ft.recipe import allowed_code

_FUNCTION = "!function"
"""YAML tag by which a task names Python code."""


def check_task_file(path: Path) -> None:
    """Refuse a task that runs Python code which the user has not allowed.

    Raises:
        RecipeError: the file cannot be read, is a group, names code, or takes a metric that runs code of the hub.
    """
    for file, functions, content in _with_included(path, []):
        if file == path and ("group" in content or isinstance(content.get("task"), list)):
            raise RecipeError(f"the file {str(path)!r} is a group of tasks; name the files of its tasks in its place")
        for code in functions:
            if not allowed_code.is_allowed(code, allowed_code.allowed_by_user()):
                raise allowed_code.refusal(code, str(file))
        for metric in _metrics(content):
            _check_metric(file, metric)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader of the harness, which keeps the names of functions and reads them as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.functions: list[str] = []
        """Names of functions in the order of the file."""


def _function_name(loader: _Loader, node: yaml.Node) -> str:
    name = str(loader.construct_scalar(node))  # as the harness reads it: of a mapping too, the value of the key `=`
    loader.functions.append(name)
    return name


_Loader.add_constructor(_FUNCTION, _function_name)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the task {str(file)!r} cannot be read ({error}); name a YAML file") from error


def _content(file: Path, text: str) -> tuple[list[str], dict[str, object]]:
    """Functions that a file names, and its content."""
    try:
        loader = _Loader(text)
        content = loader.get_single_data()
    except yaml.YAMLError as error:
        line = str(error).replace("\n", " ")
        raise RecipeError(f"the task {str(file)!r} is no YAML ({line}); mend the file") from error
    if not isinstance(content, dict):
        raise RecipeError(f"the task {str(file)!r} must be a mapping with `task`; see docs/after_fit.md")
    return loader.functions, content


def _with_included(file: Path, above: list[Path]) -> Iterator[tuple[Path, list[str], dict[str, object]]]:
    if file in above:
        raise RecipeError(f"the task {str(file)!r} includes itself; take the include out")
    functions, content = _content(file, _text(file))
    yield file, functions, content
    included = content.get("include", [])
    for name in included if isinstance(included, list) else [included]:
        yield from _with_included((file.parent / str(name)).resolve(), [*above, file])


def _metrics(content: dict[str, object]) -> Iterator[str]:
    listed = content.get("metric_list")
    for metric in listed if isinstance(listed, list) else []:
        name = metric.get("metric") if isinstance(metric, dict) else None
        if isinstance(name, str):
            yield name if not metric.get("hf_evaluate") else f"evaluate.{name}"


def _check_metric(file: Path, name: str) -> None:
    import lm_eval.api.metrics  # noqa: F401 (registers the metrics)
    from lm_eval.api.registry import metric_registry

    is_known = name in metric_registry
    if not is_known and not allowed_code.is_allowed("evaluate", allowed_code.allowed_by_user()):
        raise RecipeError(
            f"the task {str(file)!r} has the metric {name!r}, which is none of lm-evaluation-harness "
            f"({', '.join(sorted(metric_registry))}): the package `evaluate` would run it as code of the hub; if you "
            f"trust that, add {allowed_code.OPTION} evaluate"
        )
