"""Errors that a user can fix, types of options, and the common part of the tables of refused combinations."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from inspect import signature
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Row = TypeVar("_Row", bound="DataclassInstance")

DISK_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))
"""Numbers of the system's errors of a disk that is full or read-only."""


class RecipeError(ValueError):
    """Error in the recipe, the data or the folders.

    The message is one line: the value, the rule, and the fix. The command line prints it without a
    traceback and exits with code 2.
    """


class NoSuchModel(RecipeError):
    """Error for a model that is neither a folder nor to be had from the hub."""

    def __init__(self, fact: str, advice: str) -> None:
        super().__init__(fact, advice)
        self.fact = fact

    def __str__(self) -> str:
        return "; ".join(self.args)


class NotFinite(RuntimeError):
    """Error of ``trainer.fit``, on all ranks together, when a loss, a gradient norm or a weight is not finite."""


class BadRow(ValueError):
    """Error in one row of the data; the caller adds its location (file and line)."""


LIBRARY_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # includes NotImplementedError and RecursionError
    TypeError,
    ValueError,  # includes the errors of JSON and Unicode
)
"""Exceptions that other libraries raise for files and arguments that they do not expect; few document which."""


@contextmanager
def explained(what: str, fix: str, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn an exception of another library into a one-line ``RecipeError``; enclose only that library's call.

    Args:
        what: object that is read or built: the key of the recipe, or the file.
        fix: advice for the user.
        also: further exception classes of the library.

    Raises:
        RecipeError: in place of the library's exception.
    """
    try:
        yield
    except RecipeError:
        raise
    except LIBRARY_ERRORS + also as error:
        raise RecipeError(f"{what}: {type(error).__name__}: {first_line(error)}; {fix}") from error


def check_installed(what: str, extra: str, *packages: str) -> None:
    """Refuse what needs packages that are not there.

    Args:
        what: what needs them, with the verb, for the message.
        extra: extra of lit_ft that installs them.
        packages: names by which they are imported.

    Raises:
        RecipeError: one of them is not installed.
    """
    for package in packages:
        if find_spec(package.partition(".")[0]) is None:
            raise RecipeError(f"{what} the package {package}, which is not installed; pip install -e '.[{extra}]'")


def first_line(error: Exception) -> str:
    """First line of another library's message, of at most 200 characters, to be quoted within a sentence.

    All lines if the first one ends with a colon: checks of configs name the value in their last line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        lines = [" ".join(lines)]
    return lines[0].rstrip(".:")[:200] if lines else "no reason given"


@contextmanager
def option_called(option: str, name: str) -> Iterator[None]:
    """Context in which errors about an option of a recipe name what a command without a recipe calls it.

    Args:
        option: option of a recipe, as errors name it, e.g. ``model.pretrained``.
        name: what the user typed it as, e.g. ``--base``.

    Raises:
        RecipeError: as raised within, with the other name.
    """
    try:
        yield
    except RecipeError as error:
        if option not in str(error):
            raise
        raise type(error)(*(text.replace(option, name) for text in error.args)) from error


@contextmanager
def base_may_have_moved(advice: str) -> Iterator[None]:
    """Context in which the error for a base that is not there says what to do where files record its place.

    Args:
        advice: what to do.

    Raises:
        RecipeError: as raised within, with the advice.
    """
    try:
        yield
    except NoSuchModel as error:
        raise RecipeError(f"{error.fact}; {advice}") from error


def situation(heading: str, fix: str) -> str | None:
    """Field of a row in a table of what works where: None, or the reason why not, as a sentence without its subject.

    Args:
        heading: heading of the field's column in the docs.
        fix: advice for the user where a row does not work.
    """
    return field(default=None, metadata={"heading": heading, "fix": fix})


def first_refusal(rows: Iterable[_Row], name: str) -> tuple[_Row, str, str] | None:
    """First row that does not work in a situation, with the reason and the fix; None if all work."""
    for row in rows:
        if (reason := getattr(row, name)) is not None:
            return row, reason, row.__dataclass_fields__[name].metadata["fix"]
    return None


_KINDS: dict[object, tuple[type, ...]] = {int: (Integral,), float: (Real,), str: (str, os.PathLike)}
"""Classes whose objects are values of an annotation, where these are not the annotation itself."""


def check_types(where: str, made: Callable[..., object], values: Mapping[str, object]) -> None:
    """Refuse values that are not of their options' types, which no parser has compared where they come from Python.

    Args:
        where: ``model`` or ``data``, the key of the recipe.
        made: function or class whose annotations count.
        values: values by name; those of other names are passed over.

    Raises:
        RecipeError: one is of another type, or none of the names that its option takes.
    """
    for name, hint in get_type_hints(made).items():
        if name != "return" and name in values and not _fits(values[name], hint):
            raise RecipeError(f"{where}.{name}{_described(values[name], _expected(hint))}")
        if isinstance(given := values.get(name), partial):
            check_keywords(name, given)


def check_keywords(option: str, given: partial[object]) -> None:
    """Refuse names that the class or function of a ``functools.partial`` does not take, before it is called.

    Raises:
        RecipeError: there is one.
    """
    parameters = signature(given.func).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in given.keywords:
        if name not in parameters:
            near = get_close_matches(name, parameters, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(parameters)}"
            raise RecipeError(f"{option}: {getattr(given.func, '__name__', given.func)} has no {name!r}; {advice}")


def check_counts(where: str, **counts: int | None) -> None:
    """Refuse numbers below 1.

    Raises:
        RecipeError: there is one.
    """
    for name, value in counts.items():
        if value is not None and value < 1:
            raise RecipeError(f"{where}.{name}={value} must be 1 or more")


def _fits(value: object, hint: Any) -> bool:
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in parts)
    if origin is list:
        return isinstance(value, list | tuple) and all(_fits(one, parts[0]) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(_fits(one, parts[1]) for one in value.values())
    if origin is Callable:
        return callable(value)
    if origin is Any or not isinstance(origin, type):  # Any is a class since Python 3.11
        return True
    return isinstance(value, _KINDS.get(origin, (origin,))) and (origin not in (int, float) or not _is_bool(value))


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _described(value: object, expected: str) -> str:
    if value is None or isinstance(value, str | bool | Integral | Real | list | tuple | dict):
        return f"={value!r}, and {expected} is needed"
    text = f" is of type {type(value).__name__}, and {expected} is needed"
    return f"{text}; write it by its save_pretrained(FOLDER), and name the folder" if _is_saved(value) else text


def _is_saved(value: object) -> bool:
    """Whether it is a model or a tokenizer, which an option takes by name."""
    return hasattr(value, "save_pretrained")


def _expected(hint: Any) -> str:
    """Values of an annotation in words."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_expected(part) for part in parts)
    if origin is Literal:
        return parts[0] if len(parts) == 1 else f"one of {', '.join(map(str, parts))}"
    if origin is list:
        return f"a list of {_expected(parts[0])}"
    if origin is Callable:
        return f"a class or function that makes {_made(parts)}, e.g. by functools.partial,"
    if origin is NoneType:
        return "None"
    if origin is dict:
        return f"a mapping to {_expected(parts[1])}"
    return getattr(origin, "__name__", str(origin)).removeprefix("typing.")


def _made(parts: tuple[Any, ...]) -> str:
    """What a function of an annotation returns, in words."""
    kinds = get_args(parts[1]) or parts[1:] if parts else ()
    return " or ".join(_expected(kind) for kind in kinds) or "it"
