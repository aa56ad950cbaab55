"""Parser of the options that a command has beside those of a recipe; without slow imports."""

from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from lit_ft.errors import RecipeError


def whole_number(text: str) -> int:
    """Type of an option: a whole number of at least 0."""
    if (value := int(text)) < 0:
        raise ArgumentTypeError(f"{value} must be 0 or more")
    return value


whole_number.__name__ = "int"  # which argparse names


def positive(text: str) -> float:
    """Type of an option: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"{text!r} must be a number above 0, e.g. 24")
    return value


class OptionParser(ArgumentParser):
    """Parser of a command's own options, with errors in one line; an abbreviated name is refused."""

    def __init__(self, **options: Any) -> None:
        """Build a parser.

        Args:
            options: those of argparse's parser.
        """
        self._names: list[str] = []
        super().__init__(**options, allow_abbrev=False)

    def add_argument(self, *names: Any, **options: Any) -> Action:
        """Add an option, as argparse does, and note its name."""
        self._names += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def parse_known_args(  # type: ignore[override]  # argparse declares a generic namespace
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Options of the command and the arguments that are left; an abbreviation is named before what is missing."""
        for name in {argument.partition("=")[0] for argument in args or []} - {*self._names, "--"}:
            meant = [one for one in self._names if name.startswith("--") and one.startswith(name)]
            if meant:
                self.error(f"unknown option {name}; did you mean {meant[0]}?")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing the usage.

        Raises:
            RecipeError: always.
        """
        given = message.removeprefix("unrecognized arguments: ").partition("=")[0].split(" ")[0]
        if message.startswith("unrecognized") and (near := get_close_matches(given, self._names, n=1)):
            message = f"unknown option {given}; did you mean {near[0]}?"
        raise RecipeError(message if message.endswith("?") else f"{message}; see {self.prog} --help")
