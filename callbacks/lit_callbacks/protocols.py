"""Protocols that callbacks and modules may implement in addition to Lightning's hooks."""

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer


@runtime_checkable
class WritesAtTheEnd(Protocol):
    """A callback that writes files when training ends, and can write them later if the run was killed before."""

    def write_final(self, trainer: Trainer, pl_module: LightningModule, only_missing: bool = False) -> None:
        """Write the files; a collective.

        Args:
            trainer: trainer of the run.
            pl_module: the trained module.
            only_missing: write nothing if all files exist already.
        """


@runtime_checkable
class RendersPrompts(Protocol):
    """A module that renders conversations itself, e.g. with limits on the time and memory of a chat template."""

    def render_prompt(self, messages: list[dict[str, Any]]) -> str:
        """Text of a conversation, followed by the start of the assistant's turn.

        Args:
            messages: messages of the conversation, each with ``role`` and ``content``.
        """
