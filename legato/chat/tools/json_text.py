"""Incremental parser of one JSON value, which detects at every character whether the text can still be valid.

Arguments are sent to clients while they are written, and what was sent cannot be taken back: so nothing may be sent
that no JSON begins with. Python's own parser reads complete texts only.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

WHITESPACE: Final = " \t\n\r"
_CLOSERS: Final = {"{": "}", "[": "]"}
_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
_HEX: Final = frozenset("0123456789abcdefABCDEF")
# Matches whatever a number begins with.
_NUMBER_PREFIX: Final = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")


class JsonState(Enum):
    """What may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()  # after [
    KEY_OR_END = auto()  # after {
    KEY = auto()  # after a comma in an object
    COLON = auto()
    AFTER_VALUE = auto()
    STRING = auto()  # inside
    NUMBER = auto()
    LITERAL = auto()
    DONE = auto()


class JsonText:
    def __init__(self) -> None:
        self.state = JsonState.VALUE
        self._open: list[str] = []
        self._in_key = False
        # Inside a string: what is left of an escape sequence, 1 after the backslash, 5 to 2 for the digits of \u.
        self._escape = 0
        # What is left of true, false or null; a number so far.
        self._rest = ""
        self._number = ""

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._open)

    @property
    def in_string(self) -> bool:
        return self.state is JsonState.STRING

    @property
    def in_key(self) -> bool:
        return self.state is JsonState.STRING and self._in_key

    def feed(self, character: str) -> bool:
        """Whether the text can go on like that. If not, it stays where it was."""
        if self.state is JsonState.STRING:
            return self._feed_string(character)
        if self.state is JsonState.NUMBER:
            return self._feed_number(character)
        if self.state is JsonState.LITERAL:
            return self._feed_literal(character)
        if character in WHITESPACE:
            return True
        if self.state in (JsonState.VALUE, JsonState.VALUE_OR_END):
            return self._begin_value(character)
        if self.state in (JsonState.KEY, JsonState.KEY_OR_END):
            return self._begin_key(character)
        if self.state is JsonState.COLON:
            return self._step(character == ":", JsonState.VALUE)
        return self._after_value(character)

    def _step(self, fits: bool, state: JsonState) -> bool:
        if fits:
            self.state = state
        return fits

    def _begin_value(self, character: str) -> bool:
        if character == "]" and self.state is JsonState.VALUE_OR_END:
            return self._close()
        if character in _CLOSERS:
            self._open.append(character)
            return self._step(True, JsonState.KEY_OR_END if character == "{" else JsonState.VALUE_OR_END)
        if character in _LITERALS:
            self._rest = _LITERALS[character]
            return self._step(True, JsonState.LITERAL)
        if character in "-0123456789":
            self._number = character
            return self._step(True, JsonState.NUMBER)
        self._in_key = False
        return self._step(character == '"', JsonState.STRING)

    def _begin_key(self, character: str) -> bool:
        if character == "}" and self.state is JsonState.KEY_OR_END:
            return self._close()
        self._in_key = character == '"'
        return self._step(character == '"', JsonState.STRING)

    def _after_value(self, character: str) -> bool:
        if not self._open:
            return False
        if character == _CLOSERS[self._open[-1]]:
            return self._close()
        return self._step(character == ",", JsonState.KEY if self._open[-1] == "{" else JsonState.VALUE)

    def _close(self) -> bool:
        self._open.pop()
        return self._end_value()

    def _end_value(self) -> bool:
        self.state = JsonState.AFTER_VALUE if self._open else JsonState.DONE
        return True

    def _feed_string(self, character: str) -> bool:
        if self._escape > 1:
            self._escape = self._escape - 1 if self._escape > 2 else 0
            return character in _HEX
        if self._escape == 1:
            self._escape = 5 if character == "u" else 0
            return character in '"\\/bfnrtu'
        if character == '"':
            return self._step(True, JsonState.COLON) if self._in_key else self._end_value()
        self._escape = int(character == "\\")
        return character >= " "

    def _feed_number(self, character: str) -> bool:
        if _NUMBER_PREFIX.fullmatch(self._number + character):
            self._number += character
            return True
        if not self._number[-1].isdigit():
            return False
        self._end_value()
        return self.feed(character)

    def _feed_literal(self, character: str) -> bool:
        if not self._rest.startswith(character):
            return False
        self._rest = self._rest[1:]
        return self._rest != "" or self._end_value()
