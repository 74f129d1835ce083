"""Chooses the kernel and its tiles for a product with a quantized matrix, by the number of rows.

1 row             `one_row`, weight-only
2 to 16 rows      `tiled` in 16 bits, weight-only
more              8-bit matrix units, rows of x quantized one by one: fp8 with fp8 and 4-bit integers, int8 with int8;
                  16 bits for other forms and where the device has no such units
many, not 8-bit   the matrix is unpacked first, and multiplied as a dense one, or as fp8 if it has 4 bits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels.activation import Activation, gate_and_mul
from legato.kernels.device import GpuLimits, limits_of
from legato.kernels.language import ceil_div, kernel_or_torch, next_power_of_two, widened
from legato.kernels.quantized.eight_bit import EightBitRows, rows_of
from legato.kernels.quantized.one_row import one_row_linear
from legato.kernels.quantized.operand import UNIT, Operand
from legato.kernels.quantized.tiled import TiledConfig, tiled_linear
from legato.kernels.quantized.unpack import unpacked, unpacked_rows


@dataclass(frozen=True, slots=True)
class Gate:
    """What becomes of the product where the matrix is gate and up: `gate_and_mul` of it."""

    activation: Activation
    row_type: torch.dtype | None = None  # 8 bits, in which the next product will want its rows

    def apply(self, product: Tensor) -> Tensor:
        return gate_and_mul(product, self.activation, self.row_type if product.shape[0] > FEW_ROWS else None)


FEW_ROWS = 16
# Columns of a group, for a matrix of 4 bits to be multiplied as fp8.
FEWEST_IN_FP8 = 64
# Numbers that the definition in torch unpacks at once.
NUMBERS_AT_ONCE = 1 << 22
# From so many rows on it pays to unpack codes into memory, which takes 220 us for a layer of Llama-3.1-8B in 4 bits on
# an H200; 256 rows take 234 in tiles and 129 in fp8. Prompts with weight-only int8 in tiles come to 23,900 tok/s, in
# bf16 to 44,000.
MANY_ROWS = 512

Kernel = Literal["one_row", "few_rows", "fp8", "int8", "16-bit", "unpacked to fp8", "unpacked"]


# torch's product of fp8 is for more rows: with 64 it took 40 us for 4,096 x 14,336 on an H200, bf16 35.5.
SCALED_MM_ROWS = 64
# Of x; float32 is left to torch.
KERNEL_TYPES = (torch.bfloat16, torch.float16)


def kernel_for(num_rows: int, operand: Operand, limits: GpuLimits) -> Kernel:
    if num_rows == 1:
        return "one_row"
    if num_rows <= FEW_ROWS:
        return "few_rows"
    is_fine = operand.has_small_groups and not operand.is_packed
    # Triton multiplies no int8 on the matrix units of older ones.
    if operand.form == "int8" and not is_fine and limits.sm >= 80:
        return "int8"
    is_fp8 = operand.form == "fp8" and not is_fine
    suits_fp8 = is_fp8 or (operand.form == "int4" and operand.group_size >= FEWEST_IN_FP8)
    is_weight_only = operand.is_packed or operand.form == "codes" or (is_fine and operand.form != "fp8")
    if is_weight_only and num_rows >= MANY_ROWS:
        return "unpacked to fp8" if suits_fp8 and _suits_scaled_mm(operand) else "unpacked"
    if suits_fp8 and limits.sm >= 89:
        return "fp8"
    return "16-bit"


def can_copy_to_fp8(operand: Operand) -> bool:
    """Whether an fp8 copy would serve products of many rows. Of tables, too: multiplied in 16 bits they are slower than
    dense matrices (256 streams on an H200: nf4 13,579 tok/s, bf16 20,498)."""
    is_fine = operand.form == "table" or (operand.form == "int4" and operand.group_size >= FEWEST_IN_FP8)
    return is_fine and limits_of(operand.numbers).sm >= 89 and _suits_scaled_mm(operand)


def row_type_of(operand: Operand) -> torch.dtype | None:
    """What rows are quantized to from `FEW_ROWS` on; None: they are not."""
    kernel = kernel_for(FEW_ROWS + 1, operand, limits_of(operand.numbers))
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kernel)


def quantized_linear(x: Tensor, operand: Operand, bias: Tensor | None = None, gate: Gate | None = None) -> Tensor:
    """x [m, in] -> [m, out], or with a gate [m, out / 2]."""
    run = _KERNELS[kernel_for(x.shape[0], operand, limits_of(x))]
    return kernel_or_torch(x, run, quantized_linear_torch)(x, operand, bias, gate)


def quantized_linear_torch(x: Tensor, operand: Operand, bias: Tensor | None = None, gate: Gate | None = None) -> Tensor:
    """Some rows of the matrix at a time, so that what is unpacked stays small."""
    step = max(1, NUMBERS_AT_ONCE // operand.in_features)
    pieces = [operand.rows(first, first + step) for first in range(0, operand.out_features, step)]
    product = torch.cat([F.linear(x, piece.values(widened(x[:0]).dtype).to(x.dtype)) for piece in pieces], dim=1)
    return _gated(product if bias is None else product + bias, gate)


def _one_row(x: Tensor, operand: Operand, bias: Tensor | None, gate: Gate | None) -> Tensor:
    # The kernel reads x in numbers of 64 bits.
    aligned = x.contiguous() if x.storage_offset() % 4 == 0 else x.clone(memory_format=torch.contiguous_format)
    return one_row_linear(aligned, operand, bias, _activation(gate))


def _few_rows(x: Tensor, operand: Operand, bias: Tensor | None, gate: Gate | None) -> Tensor:
    config = tiled_config(x.shape[0], operand, x.element_size(), limits_of(x))
    return tiled_linear(x, operand, config, bias=bias, activation=_activation(gate))


def _in_16_bits(x: Tensor, operand: Operand, bias: Tensor | None, gate: Gate | None) -> Tensor:
    return _few_rows(x, operand, bias, gate)


def _in_fp8(x: Tensor, operand: Operand, bias: Tensor | None, gate: Gate | None) -> Tensor:
    rows = rows_of(x, torch.float8_e4m3fn)
    is_plain = operand.form == "fp8" and operand.has_one_scale and x.dtype == torch.bfloat16
    if is_plain and x.shape[0] > SCALED_MM_ROWS and _suits_scaled_mm(operand):
        return _scaled_mm(rows, x.dtype, operand, bias, gate)
    return _in_8_bits(rows, x.dtype, operand, bias, gate)


def _in_int8(x: Tensor, operand: Operand, bias: Tensor | None, gate: Gate | None) -> Tensor:
    return _in_8_bits(rows_of(x, torch.int8), x.dtype, operand, bias, gate)


def _unpacked(x: Tensor, operand: Operand, bias: Tensor | None, gate: Gate | None) -> Tensor:
    return _gated(F.linear(x, unpacked(operand, x.dtype), bias), gate)


def _unpacked_to_fp8(x: Tensor, operand: Operand, bias: Tensor | None, gate: Gate | None) -> Tensor:
    return _scaled_mm(rows_of(x, torch.float8_e4m3fn), x.dtype, unpacked_rows(operand), bias, gate)


_KERNELS: dict[Kernel, Callable[[Tensor, Operand, Tensor | None, Gate | None], Tensor]] = {
    "one_row": _one_row,
    "few_rows": _few_rows,
    "fp8": _in_fp8,
    "int8": _in_int8,
    "16-bit": _in_16_bits,
    "unpacked to fp8": _unpacked_to_fp8,
    "unpacked": _unpacked,
}


def _in_8_bits(
    rows: EightBitRows, dtype: torch.dtype, operand: Operand, bias: Tensor | None, gate: Gate | None
) -> Tensor:
    config = tiled_config(rows.numbers.shape[0], operand, 1, limits_of(rows.numbers))
    return tiled_linear(rows.numbers, operand, config, rows.scale, dtype, bias, _activation(gate))


def _scaled_mm(
    rows: EightBitRows, dtype: torch.dtype, operand: Operand, bias: Tensor | None, gate: Gate | None
) -> Tensor:
    product = scaled_mm(rows, operand).to(dtype)
    if bias is not None:
        product += bias
    return _gated(product, gate)


def scaled_mm(rows: EightBitRows, operand: Operand) -> Tensor:
    """torch's own product of fp8 matrices with a scale for each row of both, which is there in bfloat16 alone."""
    return torch._scaled_mm(
        rows.numbers,
        operand.numbers.t(),
        scale_a=rows.scale[:, None],
        scale_b=operand.scale.float().t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _suits_scaled_mm(operand: Operand) -> bool:
    """Which wants sizes that are multiples of 16."""
    is_even = operand.in_features % 16 == 0 and operand.out_features % 16 == 0
    return is_even and operand.numbers.is_cuda and _has_scaled_mm(operand.numbers.device)


@cache
def _has_scaled_mm(device: torch.device) -> bool:
    """Tried once: which devices have it depends on torch's version."""
    x = torch.ones(32, 32, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones(32, 1, device=device)
    try:
        torch._scaled_mm(x, x.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
    except RuntimeError:
        return False
    return True


def _gated(product: Tensor, gate: Gate | None) -> Tensor:
    return product if gate is None else gate.apply(product)


def _activation(gate: Gate | None) -> Activation | None:
    return None if gate is None else gate.activation


def tiled_config(num_rows: int, operand: Operand, itemsize: int, limits: GpuLimits) -> TiledConfig:
    """By the number of rows, and what fits the device; sums are split where there are fewer programs than
    multiprocessors."""
    rows = min(next_power_of_two(num_rows, 8), 128)
    if rows <= 16:
        tile_rows, num_warps, num_stages = 32, 2, 5
    elif rows <= 64 or operand.is_packed:
        # Two programs share a multiprocessor: one unpacks while the matrix units have the other's numbers.
        tile_rows, num_warps, num_stages = 64, 4, 4 if rows <= 64 else 3
    else:
        tile_rows, num_warps, num_stages = 128, 8, 4
    config = TiledConfig(tile_rows, rows, num_warps, num_stages)
    while config.num_stages > 2 and shared_memory(config, operand, itemsize) > limits.shared_memory:
        config = replace(config, num_stages=config.num_stages - 1)
    for size, warps in ((64, 4), (32, 2)):
        if shared_memory(config, operand, itemsize) > limits.shared_memory:
            config = TiledConfig(size, min(rows, size), warps, 2)
    # So many programs are on a multiprocessor at once, and it takes that many to keep memory busy.
    at_once = 12 if rows <= 16 else 6 if rows <= 64 else 2 if config.num_warps == 4 else 1
    num_programs = ceil_div(operand.out_features, config.tile_rows) * ceil_div(num_rows, config.rows)
    num_wanted, split_k = limits.num_multiprocessors * at_once, 1
    while split_k < 8 and num_programs * split_k * 2 <= num_wanted and operand.in_features >= 1024 * split_k:
        split_k *= 2
    return replace(config, split_k=split_k)


def shared_memory(config: TiledConfig, operand: Operand, itemsize: int) -> int:
    """Upper bound of what Triton allocates: a step of numbers and of x for each stage, and where a step has several
    groups of columns, a scale and a minimum of each."""
    step = config.tile_rows * (64 if operand.is_packed else 128) + config.rows * 128 * itemsize
    if operand.num_groups > 1 and operand.group_size % UNIT:
        step += config.tile_rows * (UNIT // operand.group_size) * 8
    return config.num_stages * step + 4096
