"""Parses one call from a stream of text: `{"name": "weather", "arguments": {"city": "Oslo"}}`.

What is certain can be taken at any time. Nothing is certain before a name that some tool has and the brace that opens
the arguments; until then the text may turn out to be no call at all.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Final

import msgspec

from legato.chat.tools.json_text import WHITESPACE, JsonState, JsonText

NAME: Final = "name"
# Models are trained on either word, and mix them up.
ARGUMENTS: Final = ("arguments", "parameters")


class CallReader:
    """The first character must be the call's brace."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._json = JsonText()
        self._key = ""
        # The value of a key of the call, in the making. None between values.
        self._value: str | None = None
        self._streams = False
        self._new_arguments = ""
        self._has_arguments = False
        self.name: str | None = None

    @property
    def done(self) -> bool:
        return self._json.state is JsonState.DONE

    @property
    def certain(self) -> bool:
        """That this is a call, with a name and arguments to show."""
        return self.name is not None and self._has_arguments

    @property
    def arguments_ended(self) -> bool:
        return self._has_arguments and self._json.depth == 1

    def take(self) -> str:
        """More of the arguments."""
        taken, self._new_arguments = self._new_arguments, ""
        return taken

    def feed(self, character: str) -> bool:
        """False: this is no call, or one that breaks off here."""
        if character < " " and self._json.in_string:
            # A line break within a string is the most frequent mistake of models, and its meaning is clear.
            return all(map(self._feed, json.dumps(character)[1:-1]))
        return self._feed(character)

    def _feed(self, character: str) -> bool:
        text = self._json
        state, depth, in_key = text.state, text.depth, text.in_key
        if not text.feed(character):
            return False
        if depth == 1 and in_key:
            self._key += character
        elif depth == 1 and text.in_key:  # its first quote
            self._key, self._value = character, None
        elif depth == 1 and state is JsonState.VALUE and character not in WHITESPACE:
            return self._begin_value(character)
        elif self._value is not None:
            return self._go_on(character)
        if self.done:
            return self._finish()
        return True

    def _begin_value(self, character: str) -> bool:
        self._key = json.loads(self._key)
        self._value = character
        if self._key == NAME:
            return character == '"' and self.name is None
        if self._key not in ARGUMENTS:
            return True
        if self._has_arguments:
            return False
        self._streams = character == "{"
        if self._streams:
            self._has_arguments = True
            self._new_arguments = character
        return character in '{"n'  # an object, the text of one, or null for none

    def _go_on(self, character: str) -> bool:
        assert self._value is not None
        ended = self._json.depth == 1 and self._json.state is JsonState.AFTER_VALUE
        if self._streams:
            self._new_arguments += character
            if ended:
                self._streams, self._value = False, None
            return True
        self._value += character
        if self.done:
            return self._finish()
        return self._end_value(self._value) if ended else True

    def _end_value(self, value: str) -> bool:
        self._value = None
        if self._key == NAME:
            self.name = json.loads(value)
            return self.name in self._names
        if self._key in ARGUMENTS and value.startswith('"'):
            return self._take_text(json.loads(value))
        return True

    def _take_text(self, text: str) -> bool:
        """Arguments that were written as OpenAI's clients see them: as the JSON of an object, in a string."""
        try:
            arguments = msgspec.json.decode(text)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return False
        self._has_arguments = True
        self._new_arguments = text
        return isinstance(arguments, dict)

    def _finish(self) -> bool:
        if self.name is None:
            return False
        if not self._has_arguments:
            self._has_arguments = True
            self._new_arguments = "{}"
        return True
