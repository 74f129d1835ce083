"""A split-K matrix product with two parts that are not yet added: for a few dozen rows and long matrices.

With so few rows a product has too few tiles of the result for the multiprocessors of a large chip. cuBLAS then splits
the sums by itself, and adds them up with a launch of its own. The norm behind the product can do that on the way
(`add_rms_norm`), since it reads the result anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.language import widened

NUM_PARTS = 2


def pays_to_split(x: Tensor, weight: Tensor) -> bool:
    """What it saves on an H200, the norm included, for 4,096 outputs: at 96 to 224 rows 7 to 17 % with 14,336 inputs
    and 5 to 25 % with 4,096; at 256 rows 6 % and nothing; beyond it costs more than it saves."""
    out_features, in_features = weight.shape
    if not x.is_cuda or x.dtype == torch.float32 or in_features % (8 * NUM_PARTS):
        return False
    return 64 < x.shape[0] <= (256 if in_features > 2 * out_features else 224)


def split_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in], weight [out, in] → [2, T, out] float32, whose sum is the product."""
    inputs = x.unflatten(1, (NUM_PARTS, -1)).transpose(0, 1)
    halves = weight.unflatten(1, (NUM_PARTS, -1)).permute(1, 2, 0)
    if not x.is_cuda:
        return torch.bmm(widened(inputs), widened(halves))
    return torch.bmm(inputs, halves, out_dtype=torch.float32)
