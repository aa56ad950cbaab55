"""What callbacks and modules may be asked for beside Lightning's hooks."""

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer


@runtime_checkable
class WritesAtTheEnd(Protocol):
    """A callback that writes something when training ends, and writes it later where a killed run could not."""

    def write_final(self, trainer: Trainer, pl_module: LightningModule, only_missing: bool = False) -> None:
        """Write it; a collective.

        Args:
            trainer: of the run.
            pl_module: as it was trained.
            only_missing: leave out what is there.
        """


@runtime_checkable
class RendersPrompts(Protocol):
    """A module that renders conversations itself, as within limits on what a chat template may take."""

    def render_prompt(self, messages: list[dict[str, Any]]) -> str:
        """The text of a conversation, with the opening of the assistant's turn.

        Args:
            messages: each with ``role`` and ``content``.
        """
