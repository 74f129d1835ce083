"""The contract between router and model server: modules generated from proto/ by `make proto`.

Only this file is written by hand. Token ids in `bytes` fields are 32-bit integers, little-endian: a repeated field would
cost more to encode and decode than everything else in the admission of a long prompt.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack_token_ids(ids: Iterable[int]) -> bytes:
    return _little_endian(array("i", ids)).tobytes()


def unpack_token_ids(data: bytes) -> array[int]:
    return _little_endian(array("i", data))


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
