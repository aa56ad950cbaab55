"""Trial of a class that a recipe names, on a few values: one that a user has written fails before the long work."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_ft.errors import RecipeError, explained


class Trial(NamedTuple):
    """Trial of an object that gives a number for each of some values."""

    option: str
    """Option of the recipe that names its class."""
    tried: object

    @property
    def name(self) -> str:
        """Name of its class."""
        return type(self.tried).__name__

    def numbers(self, method: str, give: Callable[[], object], shape: tuple[int, ...], values: str) -> Tensor:
        """What it gives for some values.

        Raises:
            RecipeError: it fails, or gives something else than one number for each.
        """
        with explained(self.option, f"fix {self.name}"):
            found = give()
        if not isinstance(found, Tensor) or found.shape != shape:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise RecipeError(
                f"{self.option}: {self.name}.{method} gives {what} for {values}; return one number for each"
            )
        return found

    def check_alone(
        self, method: str, together: Tensor, give: Callable[[], Sequence[Tensor]], values: str, fix: str
    ) -> None:
        """Compare what it gives for some values with what it gives for each alone.

        Raises:
            RecipeError: it fails, or they differ.
        """
        with explained(self.option, f"fix {self.name}"), torch.no_grad():
            alone = torch.cat(list(give()))
        if alone.shape != together.shape or not torch.allclose(alone.float(), together.float(), rtol=1e-4, atol=1e-6):
            raise RecipeError(
                f"{self.option}: {self.name}.{method} gives {together.tolist()} for {values} together, and "
                f"{alone.tolist()} one by one; {fix}"
            )
