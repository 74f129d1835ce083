"""Number formats of the KV cache: the model's own, or 8 bits, which are converted where they are read and written.

e4m3 keeps 3 bits of the mantissa up to 448, e5m2 only 2, up to 57344; numbers beyond the largest of the format become
that one. Keys and values are rounded as they are, unless the checkpoint has scales for them: then they are divided by
these where they are written. Whoever reads the cache multiplies what it computes: the scale of keys is a factor of
scores, that of values one of the result, so that no key or value is touched for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.language import Scalar, constexpr, jit, tl, widened

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class KVScales:
    """What the keys and the values of a layer are divided by before they are stored."""

    keys: float
    values: float

    def __post_init__(self) -> None:
        assert self.keys > 0 and self.values > 0, self


def largest(dtype: torch.dtype) -> float:
    """Where numbers must be cut off before they are stored; 0 for formats that hold whatever the model computes."""
    return torch.finfo(dtype).max if dtype in EIGHT_BITS else 0.0


def as_stored(tensor: Tensor, dtype: torch.dtype, scale: float | None = None) -> Tensor:
    """In the format of the cache, divided by `scale`. The cast alone would make infinities or NaN of what is too large,
    on some devices."""
    if scale is not None:
        tensor = widened(tensor) * (1 / scale)
    if tensor.dtype == dtype:
        return tensor
    limit = largest(dtype)
    return (tensor.clamp(-limit, limit) if limit else tensor).to(dtype)


def store(cache: Tensor, slots: Tensor, tensor: Tensor, scale: float | None = None) -> None:
    """Write [T, ...], divided by `scale`, to the slots [T] of a cache [num_slots, ...]."""
    stored = as_stored(tensor, cache.dtype, scale)
    if cache.dtype in EIGHT_BITS:  # torch moves them as bytes only
        cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
    cache.index_copy_(0, slots, stored)


def gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The slots [n] of a cache [num_slots, ...], as they are stored, in the format of the queries that they meet."""
    return cache.index_select(0, slots).to(dtype)


@jit
def cut_off(numbers: Scalar, inverse: Scalar, LIMIT: constexpr) -> Scalar:
    """As `as_stored`, in a kernel: what `tl.store` then converts to the format of its pointer. `inverse` is that of the
    scale, or None."""
    if inverse is not None:
        numbers = numbers.to(tl.float32) * inverse
    if LIMIT > 0:
        numbers = tl.clamp(numbers.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return numbers
