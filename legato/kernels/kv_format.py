"""Number formats of the KV cache: the model's own, or 8 bits, which are converted where they are read and written.

Eight bits have no scale: keys and values are rounded as they are, and numbers beyond the largest of the format become
that one. e4m3 keeps 3 bits of the mantissa up to 448, e5m2 only 2, up to 57344.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.language import Scalar, constexpr, jit, tl

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def largest(dtype: torch.dtype) -> float:
    """Where numbers must be cut off before they are stored; 0 for formats that hold whatever the model computes."""
    return torch.finfo(dtype).max if dtype in EIGHT_BITS else 0.0


def as_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the format of the cache. The cast alone would make infinities or NaN of what is too large, on some devices."""
    if tensor.dtype == dtype:
        return tensor
    limit = largest(dtype)
    return (tensor.clamp(-limit, limit) if limit else tensor).to(dtype)


def store(cache: Tensor, slots: Tensor, tensor: Tensor) -> None:
    """Write [T, ...] to the slots [T] of a cache [num_slots, ...]."""
    stored = as_stored(tensor, cache.dtype)
    if cache.dtype in EIGHT_BITS:  # torch moves them as bytes only
        cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
    cache.index_copy_(0, slots, stored)


def gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The slots [n] of a cache [num_slots, ...], in the format of the queries that they meet."""
    return cache.index_select(0, slots).to(dtype)


@jit
def cut_off(numbers: Scalar, LIMIT: constexpr) -> Scalar:
    """The same, in a kernel: what `tl.store` then converts to the format of its pointer."""
    if LIMIT > 0:
        numbers = tl.clamp(numbers.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return numbers
