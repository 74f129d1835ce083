"""Rows of activations in 8 bits, each with a scale of its own: what the 8-bit matrix units multiply."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.language import Pointer, Scalar, constexpr, jit, kernel_or_torch, next_power_of_two, tl, widened
from legato.kernels.overlap import launch_options, wait_for_previous

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Rows without anything in them have this scale: not zero, because numbers are divided by it.
LEAST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class EightBitRows:
    numbers: Tensor  # [m, in_features] int8 or float8_e4m3fn
    scale: Tensor  # [m] float32

    def values(self, dtype: torch.dtype) -> Tensor:
        return self.numbers.to(dtype) * self.scale.to(dtype)[:, None]


def quantize_rows(x: Tensor, dtype: torch.dtype) -> EightBitRows:
    """x [m, in_features] in 8 bits: the largest number of a row becomes the largest of the type."""
    assert x.dim() == 2 and x.stride(1) == 1 and dtype in LARGEST, (x.shape, x.stride(), dtype)
    return kernel_or_torch(x, _quantize_rows_triton, _quantize_rows_torch)(x, dtype)


# What a norm or a gate has just quantized beside its result: its product asks for it next.
_prepared: list[tuple[weakref.ref[Tensor], EightBitRows]] = []


def prepare_rows(x: Tensor, rows: EightBitRows) -> None:
    """`rows` are those of `x`, until others are prepared."""
    _prepared[:] = [(weakref.ref(x), rows)]


def rows_of(x: Tensor, dtype: torch.dtype) -> EightBitRows:
    for reference, rows in _prepared:
        if reference() is x and rows.numbers.dtype == dtype:
            return rows
    return quantize_rows(x, dtype)


def _quantize_rows_torch(x: Tensor, dtype: torch.dtype) -> EightBitRows:
    wide = widened(x)
    scale = (wide.abs().amax(1) / LARGEST[dtype]).clamp(min=LEAST_SCALE)
    scaled = wide / scale[:, None]
    return EightBitRows((scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale.float())


def _quantize_rows_triton(x: Tensor, dtype: torch.dtype) -> EightBitRows:
    num_rows, width = x.shape
    rows = empty_rows(x, dtype)
    if num_rows > 0:
        block = next_power_of_two(width)
        _quantize_rows_kernel[(num_rows,)](
            rows.numbers,
            rows.scale,
            x,
            width,
            x.stride(0),
            LARGEST=LARGEST[dtype],
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(x),
        )
    return rows


def empty_rows(x: Tensor, dtype: torch.dtype) -> EightBitRows:
    """For a kernel to write: as many as x [m, width] has."""
    numbers = torch.empty(x.shape, dtype=dtype, device=x.device)
    return EightBitRows(numbers, torch.empty(x.shape[0], dtype=torch.float32, device=x.device))


@jit
def _quantize_rows_kernel(
    numbers: Pointer,
    scale: Pointer,
    x: Pointer,
    width: Scalar,
    x_stride: Scalar,
    LARGEST: constexpr,
    BLOCK: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    store_eight_bits(numbers, scale, value, row, column, width, LARGEST)


@jit
def store_eight_bits(
    numbers: Pointer,
    scale: Pointer,
    value: Scalar,
    row: Scalar,
    column: Scalar,
    width: Scalar,
    LARGEST: constexpr,
) -> None:
    """A row of float32, zeros beyond `width`. For use inside other kernels too."""
    size = tl.maximum(tl.max(tl.abs(value), axis=0) / LARGEST, 1e-12)
    tl.store(scale + row, size)
    scaled = value / size
    if LARGEST == 127.0:
        # To the nearest, and to the even one of two: what is added leaves no bits behind the point.
        scaled = (scaled + 12582912.0) - 12582912.0
    tl.store(numbers + row * width + column, scaled.to(numbers.dtype.element_ty), mask=column < width)
