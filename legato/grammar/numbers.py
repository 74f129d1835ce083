"""Numbers that end. Small models love zeros: asked for a number, they write `0.000` until nothing is left.

No schema means that, so after as many digits as any number needs the text must go on with something else. Whoever
wants a longer number can still have it, by a schema that leaves no other way.
"""

from __future__ import annotations

from typing import Final

MAX_DIGITS: Final = 64

_QUOTE, _BACKSLASH = b'"'[0], b"\\"[0]
_DIGITS = frozenset(b"0123456789")
_OTHER_NUMBER_PARTS = frozenset(b"+-.eE")


class DigitCount:
    """Follows a JSON text and counts the digits of the number at its end.

    Text around the JSON, as a Lark grammar may have it, is read as if it were JSON.
    """

    def __init__(self) -> None:
        self.digits = 0
        self._in_string = False
        self._escaped = False

    def feed(self, data: bytes) -> None:
        if self._in_string and not self._escaped and _QUOTE not in data and _BACKSLASH not in data:
            return
        for byte in data:
            if self._in_string:
                self._feed_string(byte)
            elif byte in _DIGITS:
                self.digits += 1
            elif byte not in _OTHER_NUMBER_PARTS:
                self.digits = 0
                self._in_string = byte == _QUOTE

    def _feed_string(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == _BACKSLASH:
            self._escaped = True
        elif byte == _QUOTE:
            self._in_string = False
