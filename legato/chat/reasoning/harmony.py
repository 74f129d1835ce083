"""Answers in channels, as gpt-oss writes them: reasoning, calls and the answer are messages with headers of their own.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{…}<|call|>                                     or   <|start|>assistant<|channel|>final<|message|>…

The prompt ends with `<|start|>assistant`. A message ends with `<|end|>`, or with the token that ends the whole text and
is no part of it. Commentary that is for nobody in particular is for the user.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

from legato.chat.reasoning.formats import Phase
from legato.chat.reasoning.tagged import overlap
from legato.chat.tools.parser import CallBegins, CallGoesOn, Content, Event, Thought
from legato.common.identity import new_hex

_BODY: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([\w.\-]+)")
_FUNCTIONS: Final = "functions."
# Characters of a header, after which it is none.
_MAX_HEADER: Final = 400


class HarmonyParser:
    """Reasoning and calls in one: both are channels."""

    def __init__(self, names: Container[str] = (), *, phase: Phase = Phase.INSIDE, several: bool = True) -> None:
        self._names = names
        self._max_calls = None if several else 1
        self._held = ""
        self.num_calls = 0
        # What the body that is being read is: None between bodies.
        self._kind: type[Thought | Content | CallGoesOn] | None = Content if phase is Phase.AFTER else None
        self._begun = False
        self._thinking = phase is not Phase.AFTER
        self._events: list[Event] = []

    @property
    def thinking(self) -> bool:
        return self._thinking

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._header() if self._kind is None else self._body():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        if self._kind is not None:
            self._tell(self._held)
        elif not self._begun and not self._held.lstrip().startswith("<|"):
            self._events.append(Content(self._held))
        self._held = ""
        events, self._events = self._events, []
        return events

    def _header(self) -> bool:
        head, found, rest = self._held.partition(_BODY)
        if not found:
            if not self._begun and not _may_be_header(self._held):
                self._kind, self._thinking = Content, False  # a model that does not know channels
                return True
            return len(self._held) > _MAX_HEADER and self._open("", self._held)
        return self._open(head, rest)

    def _open(self, head: str, rest: str) -> bool:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._held, self._begun = rest, True
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        if name in self._names:
            self._kind = CallGoesOn
            self.num_calls += 1
            if self._is_wanted:
                self._events.append(CallBegins(self.num_calls - 1, f"call_{new_hex(24)}", name))
        else:
            self._kind = Thought if recipient or (channel and channel[1] == "analysis") else Content
        self._thinking = self._kind is Thought
        return True

    def _body(self) -> bool:
        found = [place for end in _ENDS if (place := self._held.find(end)) >= 0]
        if found:
            place = min(found)
            self._tell(self._held[:place])
            end = next(end for end in _ENDS if self._held.startswith(end, place))
            self._held, self._kind = self._held[place + len(end) :], None
            self._begun = True
            return True
        size = max(overlap(self._held, end) for end in _ENDS)
        self._tell(self._held[: len(self._held) - size])
        self._held = self._held[len(self._held) - size :]
        return False

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls

    def _tell(self, text: str) -> None:
        if not text:
            return
        if self._kind is CallGoesOn:
            if self._is_wanted:
                self._events.append(CallGoesOn(self.num_calls - 1, text))
        elif self._kind is Thought:
            self._events.append(Thought(text))
        else:
            self._events.append(Content(text))


def _may_be_header(text: str) -> bool:
    word = text.lstrip()
    return any(word.startswith(mark) or mark.startswith(word) for mark in ("<|channel|>", "<|start|>", "to=", _BODY))
