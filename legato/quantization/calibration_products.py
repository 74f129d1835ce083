"""Products over calibration text, which are most of the work of GPTQ.

CPUs with instructions for bfloat16 compute them from rounded numbers in a third of the time. What rounding adds is a
tenth of the uncertainty that some 50,000 tokens of text leave, and a thirtieth of what 4-bit weights change.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

# Matrices with fewer inputs take no time.
LEAST_INPUTS = 256


def rounded(x: torch.Tensor) -> torch.Tensor:
    """A factor [.., in] of such products, in the type that they are computed in."""
    is_faster = x.device.type == "cpu" and x.shape[-1] >= LEAST_INPUTS and _has_bfloat16()
    return x.to(torch.bfloat16) if is_faster else x


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Of a `rounded` weight, in the type of x."""
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    product = F.linear(x.to(weight.dtype), weight).to(x.dtype)
    return product if bias is None else product.add_(bias)


def add_inner(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total [m, n] += leftᵀ right, of [T, m] and [T, n]."""
    left, right = rounded(left), rounded(right)
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    else:
        total.add_(torch.mm(left.t(), right))


@cache
def _has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
