"""Optional protocols of data modules, which a resumed fit uses."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class RewindsPlaces(Protocol):
    """Data module whose saved position can be set back to an earlier micro-batch of the epoch."""

    def rewind(self, state: dict[str, Any], micro_batch: int, ready: int) -> None:
        """Set a saved position back within its epoch.

        Args:
            state: saved state of the data module, changed in place.
            micro_batch: micro-batch of the epoch that trains next, counted from 0.
            ready: number of micro-batches of the epoch that the trainer had begun at the time of saving.
        """


@runtime_checkable
class ChecksOrder(Protocol):
    """Data module that detects whether its samples or their order differ from those of a saved position."""

    def check_order(self, state: dict[str, Any]) -> bool:
        """Whether the data has changed and the user allows it.

        Raises:
            RecipeError: it has changed, and the user has not allowed it.
        """

    def begin_again(self, state: dict[str, Any]) -> None:
        """Set a saved position to the beginning of its epoch; ``state`` is changed in place."""


@runtime_checkable
class RecountsMicroBatches(Protocol):
    """Data module that can continue within an epoch with other ranks or another micro-batch size."""

    def rescale_progress(self, checkpoint: dict[str, Any]) -> None:
        """Convert the progress within an interrupted epoch to this run's ranks and micro-batch size.

        Args:
            checkpoint: Lightning's checkpoint, changed in place.
        """
