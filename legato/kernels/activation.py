"""The gate of a gated MLP: activation(gate) * up, from the packed projection of both."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels.language import (
    Pointer,
    Scalar,
    ceil_div,
    constexpr,
    jit,
    kernel_or_torch,
    next_power_of_two,
    tl,
    widened,
)
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.quantized.eight_bit import LARGEST, empty_rows, prepare_rows, store_eight_bits

Activation = Literal["silu", "gelu", "gelu_tanh"]

# One 16-byte load of bf16 from either half for each thread of four warps.
BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return gate_and_mul(gate_up, "silu")


def gate_and_mul(gate_up: Tensor, activation: Activation = "silu", row_type: torch.dtype | None = None) -> Tensor:
    """[T, 2 * inner] → activation([T, :inner]) * [T, inner:]. With a `row_type` of 8 bits the result is also there as
    `rows_of` it.

    The activation is rounded before it is multiplied, because transformers does so: in bfloat16 one token in fifty
    would differ otherwise.
    """
    assert gate_up.dim() == 2 and gate_up.stride(1) == 1 and gate_up.shape[1] % 2 == 0, gate_up.shape
    if row_type is not None:
        return kernel_or_torch(gate_up, _gate_rows_triton, _gate_rows_torch)(gate_up, activation, row_type)
    return kernel_or_torch(gate_up, _gate_and_mul_triton, _gate_and_mul_torch)(gate_up, activation)


def activate_torch(gate: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def _gate_and_mul_torch(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = widened(gate_up).chunk(2, dim=-1)
    return (activate_torch(gate, activation).to(gate_up.dtype) * up).to(gate_up.dtype)


def _gate_rows_torch(gate_up: Tensor, activation: Activation, row_type: torch.dtype) -> Tensor:
    """`rows_of` quantizes what nothing has prepared."""
    return _gate_and_mul_torch(gate_up, activation)


def _gate_rows_triton(gate_up: Tensor, activation: Activation, row_type: torch.dtype) -> Tensor:
    """A program for each whole row, because the row has one scale."""
    num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    rows = empty_rows(out, row_type)
    if num_tokens > 0:
        block = next_power_of_two(inner)
        _gate_rows_kernel[(num_tokens,)](
            out,
            rows.numbers,
            rows.scale,
            gate_up,
            inner,
            gate_up.stride(0),
            activation,
            LARGEST[row_type],
            block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(gate_up),
        )
    prepare_rows(out, rows)
    return out


def _gate_and_mul_triton(gate_up: Tensor, activation: Activation) -> Tensor:
    num_tokens, width = gate_up.shape
    inner = width // 2
    out = torch.empty(num_tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens > 0:
        grid = (num_tokens, ceil_div(inner, BLOCK))
        options = launch_options(gate_up)
        _gate_and_mul_kernel[grid](out, gate_up, inner, gate_up.stride(0), activation, BLOCK, num_warps=4, **options)
    return out


@jit
def _gate_and_mul_kernel(
    out: Pointer,
    gate_up: Pointer,
    inner: Scalar,
    stride: Scalar,
    ACTIVATION: constexpr,
    BLOCK: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    gated = activate(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + token * inner + column, gated.to(out.dtype.element_ty), mask=inside)


@jit
def _gate_rows_kernel(
    out: Pointer,
    numbers: Pointer,
    scale: Pointer,
    gate_up: Pointer,
    inner: Scalar,
    stride: Scalar,
    ACTIVATION: constexpr,
    LARGEST: constexpr,
    BLOCK: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    gated = (activate(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32) * up).to(out.dtype.element_ty)
    tl.store(out + token * inner + column, gated, mask=inside)
    store_eight_bits(numbers, scale, gated.to(tl.float32), token, column, inner, LARGEST)


@jit
def weight_rows(tile: Scalar, TILE_ROWS: constexpr, WIDTH: constexpr, ACTIVATION: constexpr) -> Scalar:
    """Rows of a weight [WIDTH, in] that a program of a product multiplies. With an activation these are the packed
    projections, half of a tile is gate rows and half the up rows that belong to them.

    Beyond the last feature the last is computed again, which spares the loads a mask.
    """
    r = tl.arange(0, TILE_ROWS)
    if ACTIVATION is None:
        row = tl.minimum(tile * TILE_ROWS + r, WIDTH - 1)
    else:
        half: tl.constexpr = TILE_ROWS // 2
        row = tl.minimum(tile * half + r % half, WIDTH // 2 - 1) + r // half * (WIDTH // 2)
    return row


@jit
def gate_and_up(product: Scalar, ACTIVATION: constexpr) -> Scalar:
    """[rows of `weight_rows`, m], rounded -> [half of them, m], in the same dtype and with the roundings of
    `gate_and_mul`."""
    halves = tl.reshape(product, (2, product.shape[0] // 2, product.shape[1]))
    gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
    activated = activate(gate.to(tl.float32), ACTIVATION).to(product.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(product.dtype)


@jit
def activate(gate: Scalar, ACTIVATION: constexpr) -> Scalar:
    """For use inside other kernels too."""
    if ACTIVATION == "silu":
        activated = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        activated = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z).
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return activated
