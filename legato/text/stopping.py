"""Stop strings, which may begin and end inside tokens.

The result does not depend on token boundaries: the stop string that ends first counts, the longest if two end at the
same character.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to a stop string.

    With `include` the text ends with the stop string (as in TGI), so nothing is held back. Without it (as in OpenAI's
    API) text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = True) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._first_characters = {stop[0] for stop in self._stops}
        self.stopped = False
        # The stop string, once there is one.
        self.found: str | None = None
        # The longest suffix of the text that is a prefix of a stop string.
        self._partial = ""

    def feed(self, text: str) -> str:
        """The text that can be returned now, including text held back before. Empty once stopped."""
        if self.stopped:
            return ""
        if not self._partial and self._first_characters.isdisjoint(text):
            return text
        held = len(self._partial)
        buffer = self._partial + text
        match = self._match(buffer)
        if match is not None:
            start, end = match
            self.stopped, self._partial, self.found = True, "", buffer[start:end]
            return buffer[held:end] if self._include else buffer[:start]
        self._partial = buffer[self._partial_start(buffer) :]
        return text if self._include else buffer[: len(buffer) - len(self._partial)]

    def flush(self) -> str:
        """End of text: return what was held back."""
        text, self._partial = self._partial, ""
        return "" if self._include else text

    def _match(self, buffer: str) -> tuple[int, int] | None:
        """Start and end of the stop string that ends first."""
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
        """Start of the longest suffix of `buffer` that is a prefix of a stop string; its length if there is none."""
        earliest = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(buffer[start:]):
                    earliest = start
                    break
                start = buffer.find(stop[0], start + 1)
        return earliest
