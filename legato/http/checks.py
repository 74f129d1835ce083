"""The ranges of single parameters, shared by the native and OpenAI's routes. Wording is TGI's."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from legato.api.errors import InvalidRequest
from legato.scheduling.state import DEFAULT_PRIORITY, LAST_PRIORITY


def check_bias(logit_bias: Mapping[int, float]) -> None:
    for token_id, bias in logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"`logit_bias` must be >= -100 and <= 100. Given: {bias} for {token_id}", "logit_bias")


def positive(name: str, value: float | None) -> float:
    if value is None:
        return 1.0
    if as_float32(name, value) <= 0:
        raise InvalidRequest(f"`{name}` must be strictly positive", name)
    return value


def check_priority(value: int | None) -> int:
    if value is None:
        return DEFAULT_PRIORITY
    if not 0 <= value <= LAST_PRIORITY:
        raise InvalidRequest(f"`priority` must be >= 0 and <= {LAST_PRIORITY}. Given: {value}", "priority")
    return value


def penalty(name: str, value: float | None) -> float:
    if value is None:
        return 0.0
    if not -2 <= value <= 2:
        raise InvalidRequest(f"`{name}` must be >= -2.0 and <= 2.0", name)
    return value


def share(name: str, value: float | None) -> float:
    if value is None:
        return 1.0
    if as_float32(name, value) <= 0 or value > 1:
        raise InvalidRequest(f"`{name}` must be > 0.0 and < 1.0", name)
    return value


def probability(name: str, value: float | None) -> float:
    if value is None:
        return 0.0
    if not 0 <= value <= 1:
        raise InvalidRequest(f"`{name}` must be >= 0.0 and <= 1.0", name)
    return value


def as_float32(name: str, value: float) -> float:
    """What a shard will see: 1e-50 is zero there, and 1e300 nothing at all."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        raise InvalidRequest(f"`{name}` must fit in a 32-bit float. Given: {value}", name) from None
    assert isinstance(rounded, float)
    return rounded
