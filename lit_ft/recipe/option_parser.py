"""Parser of the options that a command has beside those of a recipe; without slow imports."""

from argparse import ArgumentParser
from typing import NoReturn

from lit_ft.errors import RecipeError


class OptionParser(ArgumentParser):
    """Parser of a command's own options, with errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing the usage.

        Raises:
            RecipeError: always.
        """
        raise RecipeError(f"{message}; see {self.prog} --help")
