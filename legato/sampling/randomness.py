"""One random number per row and token, as a function of (seed, position) and nothing else.

The position is the number of tokens that the request has generated. No generator is carried along, so a request draws
the same numbers whatever else is in its batch, however its prompt was cut into steps, and wherever it was preempted.

The function is splitmix64: a counter that grows by a constant stride, and a mixer that turns each of its values into
64 bits. A row keeps the counter, which is its seed and position in one number. The seed is mixed before it becomes the
start of the count, because requests with seeds 1, 2, 3 must not walk over each other's counters.

Torch has no arithmetic on unsigned 64-bit integers. Signed addition and multiplication wrap and give the same bits;
only the right shift differs, so its copies of the sign bit are masked off.
"""

from __future__ import annotations

from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(bits: int) -> int:
    """The int64 that has the same 64 bits."""
    bits &= _MASK
    return bits - (1 << 64) if bits >> 63 else bits


STRIDE = _signed(_GOLDEN)  # from one position's counter to the next one's
_FIRST_SIGNED = _signed(_FIRST)
_SECOND_SIGNED = _signed(_SECOND)


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _FIRST & _MASK
    z = (z ^ (z >> 27)) * _SECOND & _MASK
    return z ^ (z >> 31)


def counter(seed: int, position: int) -> int:
    """Where a row's counter stands before it draws the token at `position`."""
    return _signed(_mix(seed & _MASK) + (position + 1) * _GOLDEN)


def uniform(counters: Tensor) -> Tensor:
    """counters [n] int64 -> [n] float64 in [0, 1), the mixer's upper 53 bits."""
    z = (counters ^ _shift(counters, 30)).mul_(_FIRST_SIGNED)
    z = (z ^ _shift(z, 27)).mul_(_SECOND_SIGNED)
    z ^= _shift(z, 31)
    return _shift(z, 11).double().mul_(2.0**-53)


def _shift(z: Tensor, by: int) -> Tensor:
    """Right shift that fills with zeros."""
    return (z >> by).bitwise_and_(_MASK >> by)
