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
# Tokens that a program computes at once, and no fewer than the convolution is wide.
PIECE = 16


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
        state_size, width, next_power_of_two(width, PIECE), TILE,
    )  # fmt: skip
    return out


@jit_for_any("x_stride", "table_stride")
def _convolution_kernel(
    out: Pointer, x: Pointer, weight: Pointer, bias: Pointer, lower: Pointer, upper: Pointer, tables: Pointer,
    rows: Pointer, context_lens: Pointer, firsts: Pointer, counts: Pointer, x_stride: Scalar, out_stride: Scalar,
    table_stride: Scalar, block_size: Scalar, channels: Scalar, half: Scalar, has_bias: constexpr,
    state_size: constexpr, width: constexpr, piece: constexpr, tile: constexpr,
) -> None:  # fmt: skip
    """Some channels of one sequence, `piece` tokens at a time. Inputs before the step's own are in the state."""
    sequence = tl.program_id(0)
    context, first = tl.load(context_lens + sequence), tl.load(firsts + sequence).to(tl.int64)
    count = tl.where(context > 0, tl.load(counts + sequence), 0)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    channel = tl.program_id(1) * tile + tl.arange(0, tile)
    there, is_lower = channel < channels, channel < half
    start = tl.zeros((tile,), tl.float32)
    if has_bias:
        start = tl.load(bias + channel, there, other=0.0).to(tl.float32)
    total: tl.constexpr = state_size + width - 1
    # Of the state's inputs, the last one is that of the token before the first.
    last_kept = tl.where(is_lower, channel, channel - half) * total + total - 1
    position = context - count
    block = tl.load(table + tl.maximum(position - 1, 0) // block_size).to(tl.int64) * half * total
    kept = there & (position > 0)
    for begin in range(0, count, piece):
        number = begin + tl.arange(0, piece)
        sums = tl.zeros((piece, tile), tl.float32) + start[None, :]
        for tap in tl.static_range(width):
            source = number - (width - 1 - tap)  # counted from the first token of the step
            mine, before = (source >= 0) & (number < count), (source < 0) & (number < count)
            place = (first + source)[:, None] * x_stride + channel[None, :]
            inputs = tl.load(x + place, mine[:, None] & there[None, :], other=0.0).to(tl.float32)
            if begin == 0:
                old = block + last_kept[None, :] + (source + 1)[:, None]
                wanted = before[:, None] & kept[None, :]
                inputs += tl.load(lower + old, wanted & is_lower[None, :], other=0.0)
                inputs += tl.load(upper + old, wanted & (channel >= half)[None, :], other=0.0)
            taken = tl.load(weight + channel * width + tap, there, other=0.0).to(tl.float32)
            sums += inputs * taken[None, :]
        result = out + (first + number)[:, None] * out_stride + channel[None, :]
        tl.store(result, (sums * tl.sigmoid(sums)).to(out.dtype.element_ty), (number < count)[:, None] & there[None, :])
    # From the last block on: only the first one may be that which the old state is in.
    last_block = (context - 1) // block_size
    for back in range(tl.where(count > 0, last_block - position // block_size + 1, 0)):
        end = tl.minimum(context, (last_block - back + 1) * block_size)
        written = tl.load(table + last_block - back).to(tl.int64) * half * total
        for column in tl.static_range(width - 1):
            source = end - position - (width - 1) + column
            inputs = tl.load(x + (first + source) * x_stride + channel, there & (source >= 0), other=0.0).to(tl.float32)
            old, new = block + last_kept + source + 1, written + last_kept - (width - 2 - column)
            inputs += tl.load(lower + old, kept & is_lower & (source < 0), other=0.0)
            inputs += tl.load(upper + old, kept & (channel >= half) & (source < 0), other=0.0)
            tl.debug_barrier()  # what is overwritten has been read
            tl.store(lower + new, inputs, there & is_lower)
            tl.store(upper + new, inputs, there & (channel >= half))
