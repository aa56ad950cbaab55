"""The errors for what a user can mend."""

from collections.abc import Iterator
from contextlib import contextmanager


class RecipeError(ValueError):
    """Something in the recipe, the data or the folders is wrong.

    The message is one line: the value, the rule, and the fix. The command line prints it without a
    traceback and exits with code 2.
    """


class BadRow(ValueError):
    """One row of the data cannot be used; what reads it knows the place and says it."""


LIBRARY_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # with it NotImplementedError and RecursionError
    TypeError,
    ValueError,  # with it JSON's and Unicode's
)
"""What other libraries raise of files and arguments that they were not written for; few of them say which."""


@contextmanager
def explained(what: str, fix: str, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Say in one line what another library has refused. Only its own call belongs inside, nothing of lit_ft's.

    Args:
        what: that was read or built: the key of the recipe, or the file.
        fix: what to do about it.
        also: exceptions of the library's own.

    Raises:
        RecipeError: in place of what was raised.
    """
    try:
        yield
    except RecipeError:
        raise
    except LIBRARY_ERRORS + also as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0].rstrip(".:")[:200] if lines else "no reason given"
        raise RecipeError(f"{what}: {type(error).__name__}: {reason}; {fix}") from error
