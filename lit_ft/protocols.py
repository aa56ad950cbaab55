"""What a resumed fit asks of its data module; each protocol is a data module's own choice."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class RewindsPlaces(Protocol):
    """Data whose place in an epoch can be set back to an earlier micro-batch."""

    def rewind(self, state: dict[str, Any], micro_batch: int, ready: int) -> None:
        """Set a saved place back within its epoch.

        Args:
            state: of a training loader, changed in place.
            micro_batch: of the epoch, with which the run goes on; counted from 0.
            ready: micro-batches of the epoch that were begun when it was saved.
        """


@runtime_checkable
class ChecksOrder(Protocol):
    """Data that knows whether a saved place is one in the same order of the same samples."""

    def check_order(self, state: dict[str, Any]) -> bool:
        """Whether the data has changed, and the run goes on all the same.

        Raises:
            RecipeError: it has changed, and nobody has allowed it.
        """

    def begin_again(self, state: dict[str, Any]) -> None:
        """Set a saved place to the beginning of its epoch, in place."""


@runtime_checkable
class RecountsMicroBatches(Protocol):
    """Data that goes on within an epoch under other ranks or micro-batches."""

    def rescale_progress(self, checkpoint: dict[str, Any]) -> None:
        """Count the micro-batches of an interrupted epoch as this run deals them.

        Args:
            checkpoint: Lightning's, changed in place.
        """
