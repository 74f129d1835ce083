"""Separates reasoning from the answer in a stream of text, for models that mark reasoning with tags.

    BEFORE ──opening──► INSIDE ──closing──► AFTER
       └──anything else────────────────────►

Text is held back only as long as it may be a part of a marker, or white space at the end of the reasoning, which
belongs to neither part. What comes out does not depend on how the text was cut.
"""

from __future__ import annotations

from legato.chat.reasoning.formats import Phase, ReasoningFormat
from legato.chat.tools.parser import Content, Event, Thought


class TagParser:
    def __init__(self, format: ReasoningFormat, phase: Phase) -> None:
        self._format = format
        self._phase = phase
        self._held = ""
        # White space after what was told of the part that is being read, and whether anything was.
        self._space = ""
        self._said_something = False
        # The answer begins where the reasoning ended: without the white space in between.
        self._trim = False
        self._events: list[Event] = []

    @property
    def thinking(self) -> bool:
        return self._phase is Phase.INSIDE

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """The text has ended: a part of a marker is just text."""
        held, self._held = self._held, ""
        if self._phase is Phase.INSIDE:
            self._think(held)
        else:
            self._say(held)
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        """Whether there is more to do with what is held."""
        match self._phase:
            case Phase.BEFORE:
                return self._before()
            case Phase.INSIDE:
                return self._inside()
            case Phase.AFTER:
                held, self._held = self._held, ""
                self._say(held)
                return False

    def _before(self) -> bool:
        word = self._held.lstrip()
        for opening in self._format.openings:
            if word.startswith(opening):
                self._held = word[len(opening) :]
                self._phase = Phase.INSIDE
                return True
            if opening.startswith(word):
                return False
        self._phase = Phase.AFTER
        return True

    def _inside(self) -> bool:
        if not self._said_something and not self._skip_opening():
            return False
        found = [(place, closing) for closing in self._format.closings if (place := self._held.find(closing)) >= 0]
        if found:
            place, closing = min(found)
            self._think(self._held[:place])
            self._held = self._held[place + len(closing) :]
            self._phase, self._trim, self._said_something, self._space = Phase.AFTER, True, False, ""
            return True
        size = max(overlap(self._held, closing) for closing in self._format.closings)
        self._think(self._held[: len(self._held) - size])
        self._held = self._held[len(self._held) - size :]
        return False

    def _skip_opening(self) -> bool:
        """A model may open what the template had opened already. False: it may be about to."""
        word = self._held.lstrip()
        for opening in self._format.openings:
            if word.startswith(opening):
                self._held = word[len(opening) :]
                return True
            if opening.startswith(word):
                return False
        return True

    def _think(self, text: str) -> None:
        text = self._space + text if self._said_something else text.lstrip()
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._said_something = True
            self._events.append(Thought(said))

    def _say(self, text: str) -> None:
        if self._trim and not self._said_something:
            text = text.lstrip()
        if text:
            self._said_something = True
            self._events.append(Content(text))


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text the marker may begin with."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
