"""A conversation that grows turn by turn, and can be taken back and saved."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from lit_callbacks.protocols import Message

from lit_ft.errors import RecipeError


@dataclass
class Conversation:
    """Turns of a conversation."""

    system: str | None = None
    """System prompt; None leaves it to the chat template."""
    turns: list[Message] = field(default_factory=list)
    """Turns of user and assistant, in order; ``train: false`` marks an answer that is not complete."""

    @property
    def messages(self) -> list[Message]:
        """All turns without marks, with the system prompt first."""
        turns = [Message(role=turn["role"], content=turn["content"]) for turn in self.turns]
        return [*self._system_turn, *turns]

    @property
    def incomplete(self) -> int:
        """Number of answers that are not complete."""
        return sum("train" in turn for turn in self.turns)

    @property
    def _system_turn(self) -> list[Message]:
        return [Message(role="system", content=self.system)] if self.system else []

    def add(self, question: str, answer: str, is_complete: bool = True) -> None:
        """Add a question and its answer; one that was stopped or cut is not complete."""
        mark = {} if is_complete else {"train": False}
        self.turns += [Message(role="user", content=question), Message(role="assistant", content=answer, **mark)]

    def asked(self, question: str) -> list[Message]:
        """All turns and a question, of which an answer is to be generated."""
        return [*self.messages, Message(role="user", content=question)]

    def undo(self) -> bool:
        """Take back the last question and its answer; returns whether there was one."""
        taken, self.turns = self.turns[-2:], self.turns[:-2]
        return bool(taken)

    def save(self, path: Path) -> int:
        """Append the conversation to a file of JSON lines, in the form that ``data.path`` reads.

        Answers that are not complete have ``train: false``: a model that trains on them would learn to stop there.

        Returns:
            The number of lines of the file after it.

        Raises:
            RecipeError: there is nothing to save, or the file cannot be written.
        """
        if not self.turns:
            raise RecipeError("there is no turn to save yet")
        if path.suffix != ".jsonl":
            raise RecipeError(f"{str(path)!r} must end in .jsonl, the kind of file that conversations are saved in")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes() if path.exists() else b""
            line = json.dumps({"messages": [*self._system_turn, *self.turns]}, ensure_ascii=False) + "\n"
            if before and not before.endswith(b"\n"):  # many programs write no end of the last line
                line, before = "\n" + line, before + b"\n"
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
            return before.count(b"\n") + 1
        except OSError as error:
            raise RecipeError(f"{str(path)!r} cannot be written ({error.strerror}); name another file") from error
