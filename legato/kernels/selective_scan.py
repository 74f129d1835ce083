"""The two operations of a Mamba layer that see more than one token: a short convolution, and the selective scan.

Sequence i brings tokens [first, first + count) of the step, the last of its `context_lens[i]`. Each channel has a
state: of the scan [state_size], then the last inputs of the convolution [width - 1]. A block of the cache has the state
after the last of its tokens that was computed: it is read from the block of the token before the first one, and written
wherever a block or the sequence's part of the step ends.

A sequence of no tokens, or whose context is empty, is padding: nothing is computed for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

# Channels of a program. There are as many programs as sequences, times the channels over this.
TILE = 64
# Tokens whose products the torch version holds at once: [PIECE, channels, state_size].
PIECE = 32


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """Where the states of a layer are, and what a step does to them."""

    lower: Tensor  # [num_blocks, half, state_size + width - 1] float32, of the first half of the channels
    upper: Tensor  # the same, of the others
    block_tables: Tensor  # [max_rows, max_blocks] int32
    rows: Tensor  # [n] int32
    context_lens: Tensor  # [n] int32
    firsts: Tensor  # [n] int32
    counts: Tensor  # [n] int32
    block_size: int

    def read(self, block: int, channels: int) -> Tensor:
        """[channels, state_size + width - 1], a copy."""
        return torch.cat((self.lower[block], self.upper[block]))[:channels]

    def write(self, block: int, columns: slice, state: Tensor) -> None:
        """state [channels, ...], into these columns."""
        half = self.lower.shape[1]
        self.lower[block, :, columns][: len(state)] = state[:half]
        self.upper[block, : max(len(state) - half, 0), columns] = state[half:]


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, state_size: int, blocks: StateBlocks) -> Tensor:
    """x [T, channels], rows may lie apart; weight [channels, width], the last column that of the token itself; bias
    [channels] -> SiLU of the convolution [T, channels]. Keeps the last `width - 1` inputs in the state."""
    return kernel_or_torch(x, _convolution_triton, _convolution_torch)(x, weight, bias, state_size, blocks)


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, blocks: StateBlocks
) -> Tensor:
    """x, dt (before its softplus) and gate [T, channels]; a [channels, state_size], negative; b and c [T, state_size];
    d [channels] -> (scan + d x) SiLU(gate), [T, channels] in the type of x."""
    return kernel_or_torch(x, _scan_triton, _scan_torch)(x, dt, a, b, c, d, gate, blocks)


# ---- in torch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens [first, last) of the step in one block. `read` is the block with the state before them, None: there is
    none, they begin the sequence."""

    first: int
    last: int
    read: int | None
    write: int


def _stretches(blocks: StateBlocks) -> Iterator[_Stretch]:
    """Of each sequence one after the other."""
    size, tables = blocks.block_size, blocks.block_tables
    columns = (blocks.rows, blocks.context_lens, blocks.firsts, blocks.counts)
    for row, context, first, count in zip(*(column.tolist() for column in columns), strict=True):
        position = context - count
        end = first + count if context else first
        while first < end:
            here = min(end - first, size - position % size)
            table = tables[row]
            read = int(table[(position - 1) // size]) if position else None
            yield _Stretch(first, first + here, read, int(table[position // size]))
            first, position = first + here, position + here


def _convolution_torch(x: Tensor, weight: Tensor, bias: Tensor | None, state_size: int, blocks: StateBlocks) -> Tensor:
    channels, width = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for stretch in _stretches(blocks):
        before = torch.zeros(channels, width - 1, device=x.device)
        if stretch.read is not None:
            before = blocks.read(stretch.read, channels)[:, state_size:]
        inputs = torch.cat((before, x[stretch.first : stretch.last].T.float()), dim=1)
        blocks.write(stretch.write, slice(state_size, None), inputs[:, inputs.shape[1] - (width - 1) :])
        sums = F.conv1d(inputs[None], weight.float()[:, None], None if bias is None else bias.float(), groups=channels)
        out[stretch.first : stretch.last] = F.silu(sums[0]).T.to(x.dtype)
    return out


def _scan_torch(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, blocks: StateBlocks
) -> Tensor:
    channels, state_size = a.shape
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for stretch in _stretches(blocks):
        state = torch.zeros(channels, state_size, device=x.device)
        if stretch.read is not None:
            state = blocks.read(stretch.read, channels)[:, :state_size]
        for first in range(stretch.first, stretch.last, PIECE):
            piece = slice(first, min(first + PIECE, stretch.last))
            steps = F.softplus(dt[piece].float())
            decays = torch.exp(steps[:, :, None] * a)
            inputs = (steps * x[piece].float())[:, :, None] * b[piece].float()[:, None]
            states = torch.empty_like(inputs)
            for place in range(len(steps)):
                state = torch.addcmul(inputs[place], decays[place], state, out=states[place])
            out[piece] = (states @ c[piece].float()[:, :, None])[:, :, 0]
        blocks.write(stretch.write, slice(0, state_size), state)
    return ((out + x.float() * d) * F.silu(gate.float())).to(x.dtype)


# ---- in Triton -------------------------------------------------------------------------------------------------------


def _convolution_triton(x: Tensor, weight: Tensor, bias: Tensor | None, state_size: int, blocks: StateBlocks) -> Tensor:
    channels, width = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (len(blocks.rows), ceil_div(channels, TILE))
    _convolution_kernel[grid](
        out, x, weight, weight if bias is None else bias, blocks.lower, blocks.upper, blocks.block_tables, blocks.rows,
        blocks.context_lens, blocks.firsts, blocks.counts, x.stride(0), out.stride(0), blocks.block_tables.stride(0),
        blocks.block_size, channels, blocks.lower.shape[1], bias is not None, state_size, width,
        next_power_of_two(width), TILE,
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


def _scan_triton(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, blocks: StateBlocks
) -> Tensor:
    channels, state_size = a.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (len(blocks.rows), ceil_div(channels, TILE))
    _scan_kernel[grid](
        out, x, dt, a, b, c, d, gate, blocks.lower, blocks.upper, blocks.block_tables, blocks.rows,
        blocks.context_lens, blocks.firsts, blocks.counts, x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        gate.stride(0), blocks.block_tables.stride(0), blocks.block_size, channels, blocks.lower.shape[1],
        blocks.lower.shape[2], state_size, next_power_of_two(state_size), TILE,
    )  # fmt: skip
    return out


@jit_for_any("table_stride")
def _scan_kernel(
    out: Pointer, x: Pointer, dt: Pointer, a: Pointer, b: Pointer, c: Pointer, d: Pointer, gate: Pointer,
    lower: Pointer, upper: Pointer, tables: Pointer, rows: Pointer, context_lens: Pointer, firsts: Pointer,
    counts: Pointer, x_stride: Scalar, dt_stride: Scalar, b_stride: Scalar, c_stride: Scalar, gate_stride: Scalar,
    table_stride: Scalar, block_size: Scalar, channels: Scalar, half: Scalar, total: Scalar, state_size: constexpr,
    padded_size: constexpr, tile: constexpr,
) -> None:  # fmt: skip
    sequence = tl.program_id(0)
    context, first = tl.load(context_lens + sequence), tl.load(firsts + sequence).to(tl.int64)
    count = tl.where(context > 0, tl.load(counts + sequence), 0)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    channel = tl.program_id(1) * tile + tl.arange(0, tile)
    there = channel < channels
    number = tl.arange(0, padded_size)
    inside = number < state_size
    whole = there[:, None] & inside[None, :]
    decay = tl.load(a + channel[:, None] * state_size + number[None, :], whole, other=0.0).to(tl.float32)
    skip = tl.load(d + channel, there, other=0.0).to(tl.float32)
    is_lower = channel < half
    place = tl.where(is_lower, channel, channel - half)[:, None] * total + number[None, :]
    position = context - count
    state = tl.zeros((tile, padded_size), tl.float32)
    if (position > 0) & (count > 0):
        block = tl.load(table + (position - 1) // block_size).to(tl.int64) * half * total
        state = tl.load(lower + block + place, whole & is_lower[:, None], other=0.0)
        state += tl.load(upper + block + place, whole & (channel >= half)[:, None], other=0.0)
    for step in range(count):
        token = first + step
        now = tl.load(x + token * x_stride + channel, there, other=0.0).to(tl.float32)
        raw = tl.load(dt + token * dt_stride + channel, there, other=0.0).to(tl.float32)
        time = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(raw)))  # softplus, as torch has it
        into = tl.load(b + token * b_stride + number, inside, other=0.0).to(tl.float32)
        seen = tl.load(c + token * c_stride + number, inside, other=0.0).to(tl.float32)
        state = tl.exp(time[:, None] * decay) * state + (time * now)[:, None] * into[None, :]
        opened = tl.load(gate + token * gate_stride + channel, there, other=0.0).to(tl.float32)
        result = (tl.sum(state * seen[None, :], 1) + skip * now) * opened * tl.sigmoid(opened)
        tl.store(out + token * channels + channel, result.to(out.dtype.element_ty), there)
        here = position + step
        if (step == count - 1) | ((here + 1) % block_size == 0):
            block = tl.load(table + here // block_size).to(tl.int64) * half * total
            tl.store(lower + block + place, state, whole & is_lower[:, None])
            tl.store(upper + block + place, state, whole & (channel >= half)[:, None])
