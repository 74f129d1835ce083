"""Stop strings, wherever they begin and end: inside a token, across several, or several in one.

Text is read as if it came character by character, so the answer does not depend on how tokens cut it: the stop string
that ends first wins, the longest if two end together.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through until a stop string is complete.

    With `include` the stop string is the last thing that comes through (TGI's way), so nothing needs to wait. Without
    it (OpenAI's way) text that may turn out to be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = True) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._first_characters = {stop[0] for stop in self._stops}
        self.stopped = False
        # The longest end of the text so far that begins a stop string.
        self._partial = ""

    def feed(self, text: str) -> str:
        """The text that may be shown now: the oldest that was held back first. Empty once stopped."""
        if self.stopped:
            return ""
        if not self._partial and self._first_characters.isdisjoint(text):
            return text
        held = len(self._partial)
        buffer = self._partial + text
        match = self._match(buffer)
        if match is not None:
            start, end = match
            self.stopped, self._partial = True, ""
            return buffer[held:end] if self._include else buffer[:start]
        self._partial = buffer[self._partial_start(buffer) :]
        return text if self._include else buffer[: len(buffer) - len(self._partial)]

    def flush(self) -> str:
        """The text ended: what was held back is just text."""
        text, self._partial = self._partial, ""
        return "" if self._include else text

    def _match(self, buffer: str) -> tuple[int, int] | None:
        """Start and end of the stop string that is complete first."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = start, end
        return best

    def _partial_start(self, buffer: str) -> int:
        """Where the longest end of `buffer` that begins a stop string starts; its length if there is none."""
        earliest = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(buffer[start:]):
                    earliest = start
                    break
                start = buffer.find(stop[0], start + 1)
        return earliest
