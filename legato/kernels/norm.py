"""Root-mean-square norm and layer norm, alone and fused with the residual addition before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels.language import Pointer, Scalar, constexpr, jit, kernel_or_torch, next_power_of_two, tl, widened
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.quantized.eight_bit import LARGEST, EightBitRows, empty_rows, prepare_rows, store_eight_bits

# A program holds one whole row in registers.
MAX_HIDDEN_SIZE = 65536
FEW_ROWS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., hidden] → x / rms(x) * weight, computed in fp32 and rounded once. The weight may be wider than x."""
    _check(x, weight)
    return kernel_or_torch(x, _rms_norm_triton, _rms_norm_torch)(x, weight, eps)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    inplace: bool = False,
    row_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) in one pass. `inplace` writes the sum over `residual`.

    `x` may come in the parts of `split_linear`, which are added and rounded first. With a `row_type` of 8 bits the
    result is also there as `rows_of` it.
    """
    _check(x, weight, residual=residual)
    return kernel_or_torch(x, _add_rms_norm_triton, _add_rms_norm_torch)(x, residual, weight, eps, inplace, row_type)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., hidden] → (x - mean(x)) / std(x) * weight + bias, computed in fp32 and rounded once."""
    _check(x, weight, bias)
    return kernel_or_torch(x, _layer_norm_triton, _layer_norm_torch)(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual) in one pass. The sum is written over `residual`, `x` as above."""
    _check(x, weight, bias, residual)
    return kernel_or_torch(x, _add_layer_norm_triton, _add_layer_norm_torch)(x, residual, weight, bias, eps)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, residual: Tensor | None = None) -> None:
    for name, vector in (("weight", weight), ("bias", bias)):
        assert vector is None or (vector.shape == x.shape[-1:] and vector.stride(-1) == 1), (name, x.shape)
    assert x.stride(-1) == 1 and x.shape[-1] <= MAX_HIDDEN_SIZE, (x.stride(), x.shape)
    if residual is not None:
        assert residual.stride(-1) == 1, residual.stride()
        if is_in_parts(x, residual):
            assert x.shape[1:] == residual.shape and x.dtype == torch.float32, (residual.shape, x.shape)
        else:
            assert residual.shape == x.shape and residual.dtype == x.dtype, (residual.shape, x.shape)


def is_in_parts(x: Tensor, residual: Tensor) -> bool:
    """Whether `x` is a product that is yet to be added up, as `split_linear` leaves it."""
    return x.dim() > residual.dim()


def _added_up(x: Tensor, residual: Tensor) -> Tensor:
    return x.sum(dim=0).to(residual.dtype) if is_in_parts(x, residual) else x


def _rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = widened(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def _add_rms_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, inplace: bool, row_type: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`rows_of` quantizes what nothing has prepared."""
    x = _added_up(x, residual)
    total = residual.add_(x) if inplace else residual + x
    return _rms_norm_torch(total, weight, eps), total


def _layer_norm_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _add_layer_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = residual.add_(_added_up(x, residual))
    return _layer_norm_torch(total, weight, bias, eps), total


def _rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm_triton(x, weight, None, eps, False)


def _add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, inplace: bool, row_type: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    return _add_norm_triton(x, residual, weight, None, eps, False, inplace, row_type)


def _layer_norm_triton(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return _norm_triton(x, weight, bias, eps, True)


def _add_layer_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return _add_norm_triton(x, residual, weight, bias, eps, True, inplace=True)


def _norm_triton(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(out, rows[None], rows, rows, weight, bias, eps, center, add=False)
    return out.view(x.shape)


def _add_norm_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    inplace: bool,
    row_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    residual_rows = residual.view(-1, x.shape[-1])
    parts = x.view(-1, *residual_rows.shape)
    out = torch.empty(residual_rows.shape, dtype=residual.dtype, device=x.device)
    total = residual_rows if inplace else torch.empty_like(out)
    rows = None if row_type is None else empty_rows(out, row_type)
    _launch(out, parts, residual_rows, total, weight, bias, eps, center, add=True, rows=rows)
    normed = out.view(residual.shape)
    if rows is not None:
        prepare_rows(normed, rows)
    return normed, residual if inplace else total.view(residual.shape)


def _launch(
    out: Tensor,
    x: Tensor,  # [parts, rows, hidden]
    residual: Tensor,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    add: bool,
    rows: EightBitRows | None = None,  # of `out`, to be written, too
) -> None:
    num_parts, num_rows, hidden_size = x.shape
    if num_rows == 0:
        return
    block = next_power_of_two(hidden_size)
    _norm_kernel[(num_rows,)](
        out,
        x,
        residual,
        total,
        weight,
        bias,
        None if rows is None else rows.numbers,
        None if rows is None else rows.scale,
        eps,
        hidden_size,
        x.stride(1),
        x.stride(0),
        residual.stride(0),
        total.stride(0),
        CENTER=center,
        ADD=add,
        NUM_PARTS=num_parts,
        LARGEST=0.0 if rows is None else LARGEST[rows.numbers.dtype],
        BLOCK=block,
        num_warps=_num_warps(block, num_rows),
        **launch_options(x),
    )


def _num_warps(block: int, num_rows: int) -> int:
    """Two 16-byte loads of bf16 per thread: enough in flight, and few warps to wait for in the reduction. With a few
    rows one load: a step of 8 rows of an 8B model on an H200 takes 4.16 instead of 4.19 ms."""
    return min(max(block // (256 if 2 <= num_rows <= FEW_ROWS else 512), 1), 16)


@jit
def _norm_kernel(
    out: Pointer,
    x: Pointer,
    residual: Pointer,
    total: Pointer,
    weight: Pointer,
    bias: Pointer,
    numbers: Pointer,
    number_scale: Pointer,
    eps: float,
    hidden_size: Scalar,
    x_stride: Scalar,
    part_stride: Scalar,
    residual_stride: Scalar,
    total_stride: Scalar,
    CENTER: constexpr,
    ADD: constexpr,
    NUM_PARTS: constexpr,
    LARGEST: constexpr,
    BLOCK: constexpr,
    OVERLAP: constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    # No kernel writes these, so they need not wait.
    if weight is not None:
        scale = tl.load(weight + column, mask=inside, other=0.0)
    if bias is not None:
        shift = tl.load(bias + column, mask=inside, other=0.0)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        value += tl.load(x + part * part_stride + row * x_stride + column, mask=inside, other=0.0)
    value = value.to(out.dtype.element_ty)
    if ADD:
        value = value.to(tl.float32) + tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        # What the next layer reads back is the rounded sum, so the norm is the norm of that.
        value = value.to(out.dtype.element_ty)
        tl.store(total + row * total_stride + column, value, mask=inside)
    wide = value.to(tl.float32)
    if CENTER:
        wide = tl.where(inside, wide - tl.sum(wide, axis=0) / hidden_size, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden_size + eps)
    if weight is not None:
        normed *= scale.to(tl.float32)
    if bias is not None:
        normed += shift.to(tl.float32)
    rounded = normed.to(out.dtype.element_ty)
    tl.store(out + row * hidden_size + column, rounded, mask=inside)
    if numbers is not None:
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        store_eight_bits(numbers, number_scale, wide, row, column, hidden_size, LARGEST)
