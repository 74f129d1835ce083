"""The selective scan of a Mamba layer: each channel has a state of `state_size` numbers."""

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
# Tokens whose products the torch version holds at once: [PIECE, channels, state_size].
PIECE = 32


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, blocks: StateBlocks
) -> Tensor:
    """x, dt (before its softplus) and gate [T, channels]; a [channels, state_size], negative; b and c [T, state_size];
    d [channels] -> (scan + d x) SiLU(gate), [T, channels] in the type of x."""
    return kernel_or_torch(x, _scan_triton, _scan_torch)(x, dt, a, b, c, d, gate, blocks)


# ---- in torch --------------------------------------------------------------------------------------------------------


def _scan_torch(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, blocks: StateBlocks
) -> Tensor:
    channels, state_size = a.shape
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    singles = blocks.sequences.singles
    before = blocks.read(singles.read, channels)[:, :, :state_size].masked_fill_(singles.is_first[:, None, None], 0.0)
    steps = F.softplus(dt[singles.tokens].float())
    inputs = (steps * x[singles.tokens].float())[:, :, None] * b[singles.tokens].float()[:, None]
    state = torch.addcmul(inputs, torch.exp(steps[:, :, None] * a), before)
    blocks.write(singles.write, slice(0, state_size), state)
    out[singles.tokens] = (state @ c[singles.tokens].float()[:, :, None])[:, :, 0]
    for stretch in blocks.sequences.stretches:
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


def _scan_triton(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, blocks: StateBlocks
) -> Tensor:
    channels, state_size = a.shape
    sequences = blocks.sequences
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (len(sequences.rows), ceil_div(channels, TILE))
    _scan_kernel[grid](
        out, x, dt, a, b, c, d, gate, blocks.lower, blocks.upper, sequences.block_tables, sequences.rows,
        sequences.context_lens, sequences.firsts, sequences.counts, x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        gate.stride(0), sequences.block_tables.stride(0), sequences.block_size, channels, blocks.lower.shape[1],
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
