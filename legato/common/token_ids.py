"""Token ids between processes: 32 bits each, least significant byte first. A list of numbers would cost more to pack
and unpack than everything else that the admission of a long prompt takes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack(ids: Iterable[int]) -> bytes:
    return _swapped(array("i", ids)).tobytes()


def unpack(data: bytes) -> array[int]:
    return _swapped(array("i", data))


def _swapped(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
