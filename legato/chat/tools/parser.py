"""Splits a stream of text into content and tool calls.

    TEXT ──opening──► OPENED ──{──► CALL ──}──► AFTER ──{ or opening──► ...
      ▲                 │ no call     │           │ anything else
      └─────────────────┴─────────────┴───────────┘

Text is held back only as long as it may be the beginning of a call: at white space, at a part of a marker, and from an
opening to the arguments. What turns out to be no call is content, word for word. A call that breaks off later stays
what it was by then, and what follows is content.

It goes character by character, so what comes out does not depend on how the text was cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from legato.chat.tools.call_reader import ARGUMENTS, NAME, CallReader
from legato.chat.tools.dialects import END_OF_FENCE, FENCE, Dialect
from legato.chat.tools.json_text import WHITESPACE
from legato.common.identity import new_hex

# Characters between an opening and a brace after which it is no name of a tool any more.
_MAX_HEAD = 256


@dataclass(slots=True)
class Content:
    text: str


@dataclass(slots=True)
class Thought:
    """What the model says to itself before it answers. The parsers of `chat/reasoning` tell it apart."""

    text: str


@dataclass(slots=True)
class CallBegins:
    index: int
    id: str
    name: str


@dataclass(slots=True)
class CallGoesOn:
    """More of the arguments. The first of a call comes right after its beginning."""

    index: int
    arguments: str


Event = Content | Thought | CallBegins | CallGoesOn


@dataclass(slots=True)
class ParsedCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """All events of a text together."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Thought):
                self.reasoning += event.text
            elif isinstance(event, CallBegins):
                self.calls.append(ParsedCall(event.id, event.name))
            else:
                self.calls[event.index].arguments += event.arguments


class CallParser:
    def __init__(self, dialect: Dialect, names: Container[str], *, several: bool = True) -> None:
        """`several` calls, or only the first: what a model calls beyond that is left out."""
        self._dialect = dialect
        self._openings, self._closings = (*dialect.openings, FENCE), (*dialect.closings, END_OF_FENCE)
        self._names = names
        self._max_calls = None if several else 1
        self._brackets = "{[" if "]" in dialect.closings else "{"
        self._state: Callable[[str], None] = self._in_text
        # Held back: content, unless a call comes of it.
        self._held = ""
        self._reader = CallReader(names)
        self._begun = False
        # A call without braces around it: the reader was given some.
        self._braces_added = False
        self._said_something = False
        self._events: list[Event] = []
        self.num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0

    def feed(self, text: str) -> list[Event]:
        for character in text:
            self._state(character)
        return self._take()

    def finish(self) -> list[Event]:
        """The text has ended."""
        if self._state != self._after_call or self._held.strip(WHITESPACE):
            self._say(self._held)
        self._held = ""
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # ---- states -----------------------------------------------------------------------------------------------------

    def _in_text(self, character: str) -> None:
        self._held += character
        while self._held:
            word = self._held.lstrip(WHITESPACE)
            if word in self._openings:
                self._state = self._opened
                return
            if self._dialect.bare and not self._said_something and word and word in self._brackets:
                self._held = self._held[:-1]
                self._state = self._opened
                self._opened(word)
                return
            if any(opening.startswith(word) for opening in self._openings) or not word:
                return
            self._say(self._held[0])
            self._held = self._held[1:]

    def _opened(self, character: str) -> None:
        """Between an opening and the brace of a call. There may be a bracket, or the name of the tool."""
        if character == "{":
            self._begin_call()
        elif character in WHITESPACE + self._brackets or self._may_be_name():
            self._held += character
        else:
            self._no_call(character)

    def _begin_call(self) -> None:
        self._reader = CallReader(self._names)
        self._begun = False
        self._state = self._in_call
        name = self._name_before()
        self._braces_added = name is not None
        if name is not None:
            for character in f'{{"{NAME}":{json.dumps(name)},"{ARGUMENTS[0]}":':
                if not self._reader.feed(character):
                    self._no_call("{")
                    return
        self._in_call("{")

    def _in_call(self, character: str) -> None:
        if not self._reader.feed(character):
            self._no_call(character)
            return
        if not self._begun:
            self._held += character
        if self._braces_added and self._reader.arguments_ended:
            self._reader.feed("}")
        self._show_call()
        if self._reader.done:
            self._state = self._after_call

    def _after_call(self, character: str) -> None:
        self._held += character
        word = self._held.lstrip(WHITESPACE)
        if word in self._closings:
            self._held = ""
        elif word in self._openings:
            self._state = self._opened
        elif word == "{":
            self._held = self._held[:-1]
            self._begin_call()
        elif word and not any(marker.startswith(word) for marker in self._closings + self._openings):
            self._back_to_text()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _no_call(self, character: str) -> None:
        """What was held is content up to this character, with which something else may begin."""
        self._say(self._held)
        self._held = character
        self._back_to_text()

    def _back_to_text(self) -> None:
        held, self._held = self._held, ""
        self._state = self._in_text
        for character in held:
            self._state(character)

    def _show_call(self) -> None:
        reader = self._reader
        if not reader.certain:
            return
        if not self._begun:
            assert reader.name is not None
            self._begun, self._held = True, ""
            self.num_calls += 1
            self._tell(CallBegins(self.num_calls - 1, f"call_{new_hex(24)}", reader.name))
        if arguments := reader.take():
            self._tell(CallGoesOn(self.num_calls - 1, arguments))

    def _tell(self, event: CallBegins | CallGoesOn) -> None:
        if self._max_calls is not None and event.index >= self._max_calls:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, CallGoesOn) and isinstance(event, CallGoesOn) and last.index == event.index:
            last.arguments += event.arguments
        else:
            self._events.append(event)

    def _say(self, text: str) -> None:
        if not text:
            return
        self._said_something = True
        if self._events and isinstance(self._events[-1], Content):
            self._events[-1].text += text
        else:
            self._events.append(Content(text))

    # ---- a name before the arguments --------------------------------------------------------------------------------

    def _may_be_name(self) -> bool:
        return self._dialect.after_name is not None and len(self._held) < _MAX_HEAD and FENCE not in self._held

    def _name_before(self) -> str | None:
        """What stands between the last opening and the arguments, if that is not a bracket."""
        if self._dialect.after_name is None:
            return None
        head = min((self._held.rpartition(opening)[2] for opening in self._openings), key=len)
        name = head.removesuffix(self._dialect.after_name).strip(WHITESPACE)
        return None if name in ("", "[") else name
