"""Errors that a user can fix, and the common part of the tables of refused combinations."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Row = TypeVar("_Row", bound="DataclassInstance")


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
