"""A short causal convolution of each channel by itself, whose last inputs are kept in the state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from legato.kernels.language import (
    Pointer,
    Scalar,
    ceil_div,
    constexpr,
    jit_for_any,
    kernel_or_torch,
    next_power_of_two,
    tl,
)
from legato.kernels.recurrent.states import StateBlocks

# Channels of a program. There are as many programs as sequences, times the channels over this.
TILE = 64


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, state_size: int, blocks: StateBlocks) -> Tensor:
    """x [T, channels], rows may lie apart; weight [channels, width], the last column that of the token itself; bias
    [channels] -> SiLU of the convolution [T, channels]. Keeps the last `width - 1` inputs in the state."""
    return kernel_or_torch(x, _convolution_triton, _convolution_torch)(x, weight, bias, state_size, blocks)


# ---- in torch --------------------------------------------------------------------------------------------------------


def _convolution_torch(x: Tensor, weight: Tensor, bias: Tensor | None, state_size: int, blocks: StateBlocks) -> Tensor:
    channels, width = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taps, added = weight.float(), None if bias is None else bias.float()
    columns, singles = slice(state_size, None), blocks.sequences.singles
    before = blocks.read(singles.read, channels)[:, :, columns].masked_fill_(singles.is_first[:, None, None], 0.0)
    window = torch.cat((before, x[singles.tokens].float()[:, :, None]), dim=2)
    blocks.write(singles.write, columns, window[:, :, 1:])
    sums = (window * taps).sum(2)
    out[singles.tokens] = F.silu(sums if added is None else sums + added).to(x.dtype)
    for stretch in blocks.sequences.stretches:
        before = torch.zeros(channels, width - 1, device=x.device)
        if stretch.read is not None:
            before = blocks.read(stretch.read, channels)[:, columns]
        inputs = torch.cat((before, x[stretch.first : stretch.last].T.float()), dim=1)
        blocks.write(stretch.write, columns, inputs[:, inputs.shape[1] - (width - 1) :])
        sums = F.conv1d(inputs[None], taps[:, None], added, groups=channels)
        out[stretch.first : stretch.last] = F.silu(sums[0]).T.to(x.dtype)
    return out


# ---- in Triton -------------------------------------------------------------------------------------------------------


def _convolution_triton(x: Tensor, weight: Tensor, bias: Tensor | None, state_size: int, blocks: StateBlocks) -> Tensor:
    channels, width = weight.shape
    sequences = blocks.sequences
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (len(sequences.rows), ceil_div(channels, TILE))
    _convolution_kernel[grid](
        out, x, weight, weight if bias is None else bias, blocks.lower, blocks.upper, sequences.block_tables,
        sequences.rows, sequences.context_lens, sequences.firsts, sequences.counts, x.stride(0), out.stride(0),
        sequences.block_tables.stride(0), sequences.block_size, channels, blocks.lower.shape[1], bias is not None,
        state_size, width, next_power_of_two(width), TILE,
    )  # fmt: skip
    return out


@jit_for_any("x_stride", "table_stride")
def _convolution_kernel(
    out: Pointer, x: Pointer, weight: Pointer, bias: Pointer, lower: Pointer, upper: Pointer, tables: Pointer,
    rows: Pointer, context_lens: Pointer, firsts: Pointer, counts: Pointer, x_stride: Scalar, out_stride: Scalar,
    table_stride: Scalar, block_size: Scalar, channels: Scalar, half: Scalar, has_bias: constexpr,
    state_size: constexpr, width: constexpr, padded_width: constexpr, tile: constexpr,
) -> None:  # fmt: skip
    """The window of the last `width` inputs moves along: its first columns are what the state has of it."""
    sequence = tl.program_id(0)
    context, first = tl.load(context_lens + sequence), tl.load(firsts + sequence).to(tl.int64)
    count = tl.where(context > 0, tl.load(counts + sequence), 0)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    channel = tl.program_id(1) * tile + tl.arange(0, tile)
    there = channel < channels
    taps = tl.arange(0, padded_width)
    taken = there[:, None] & (taps < width)[None, :]
    weights = tl.load(weight + channel[:, None] * width + taps[None, :], taken, other=0.0).to(tl.float32)
    start = tl.zeros((tile,), tl.float32)
    if has_bias:
        start = tl.load(bias + channel, there, other=0.0).to(tl.float32)
    total: tl.constexpr = state_size + width - 1
    is_lower = channel < half
    place = tl.where(is_lower, channel, channel - half)[:, None] * total + state_size + taps[None, :]
    kept = there[:, None] & (taps < width - 1)[None, :]
    position = context - count
    # Column k has the input of k - (width - 1) tokens before the next one, as the state has it.
    window = tl.zeros((tile, padded_width), tl.float32)
    if (position > 0) & (count > 0):
        block = tl.load(table + (position - 1) // block_size).to(tl.int64) * half * total
        window = tl.load(lower + block + place, kept & is_lower[:, None], other=0.0)
        window += tl.load(upper + block + place, kept & (channel >= half)[:, None], other=0.0)
    for number in range(count):
        token = first + number
        now = tl.load(x + token * x_stride + channel, there, other=0.0).to(tl.float32)
        window = tl.where((taps == width - 1)[None, :], now[:, None], window)
        sums = start + tl.sum(window * weights, 1)
        tl.store(out + token * out_stride + channel, (sums * tl.sigmoid(sums)).to(out.dtype.element_ty), there)
        # One column to the left: of k the value of k + 1.
        moved = tl.zeros((tile, padded_width), tl.float32)
        for tap in tl.static_range(width - 1):
            column = tl.sum(tl.where((taps == tap + 1)[None, :], window, 0.0), 1)
            moved = tl.where((taps == tap)[None, :], column[:, None], moved)
        window = moved
        here = position + number
        if (number == count - 1) | ((here + 1) % block_size == 0):
            block = tl.load(table + here // block_size).to(tl.int64) * half * total
            tl.store(lower + block + place, window, kept & is_lower[:, None])
            tl.store(upper + block + place, window, kept & (channel >= half)[:, None])
