"""Scans JSON byte by byte: whether the position is inside a string, and the length of the last number.

Small models like zeros: asked for a number, they write `0.000` until `max_tokens`. So after `MAX_DIGITS` digits the
text must go on with something else, unless its schema leaves no other way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

MAX_DIGITS: Final = 64

_QUOTE, _BACKSLASH = b'"\\'
_DIGITS = frozenset(b"0123456789")
_OTHER_NUMBER_PARTS = frozenset(b"+-.eE")


@dataclass(slots=True)
class JsonScanner:
    """Text around the JSON, as a Lark grammar may have it, is read as if it were JSON."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0

    def feed(self, data: bytes) -> None:
        if self.in_string and not self.escaped and _QUOTE not in data and _BACKSLASH not in data:
            return
        for byte in data:
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.escaped = byte == _BACKSLASH
                self.in_string = byte != _QUOTE
            elif byte in _DIGITS:
                self.digits += 1
            elif byte not in _OTHER_NUMBER_PARTS:
                self.digits = 0
                self.in_string = byte == _QUOTE

    def after(self, data: bytes) -> JsonScanner:
        scanner = replace(self)
        scanner.feed(data)
        return scanner
