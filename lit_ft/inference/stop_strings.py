"""Stop strings: text is handed on only when it can no longer be the beginning of one."""

from collections.abc import Sequence


class StopStrings:
    """Filter of an answer's text that ends before the first stop string, also where pieces cut one in two."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.found = False
        """Whether a stop string has occurred."""

    def add(self, piece: str) -> str:
        """Add a piece of text; returns what can be shown now."""
        text = self._held + piece
        places = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        begun = [
            size
            for stop in self._stops
            for size in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:size])
        ]
        shown = len(text) - max(begun, default=0)
        self._held = text[shown:]
        return text[:shown]

    def end(self) -> str:
        """Rest of the text, in which no stop string can begin any more."""
        rest, self._held = self._held, ""
        return rest
