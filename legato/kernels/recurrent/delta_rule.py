"""The gated delta rule: linear attention whose state S [key_size, value_size] of a head is an associative memory.

A token with key k, value v, decay a <= 0 and strength s first lets the state decay, then corrects what the state has
for its key, and reads what it has for its query:

    S = exp(a) S;  S = S + k d^T  with  d = s (v - S^T k);  o = S^T q

Queries and keys have the length one, queries are divided by the root of their size. Several value heads in a row share
one head of queries and keys.
"""

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
from legato.kernels.recurrent.states import StateSequences

# Columns of a state that a program has, all of their rows: they do not depend on other columns. They are few enough for
# one warp, so that no sum over the rows crosses warps.
TILE = 16
# Tokens that the torch version computes at once.
PIECE = 64
# Added to squared lengths.
EPS = 1e-6


def delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, rates: Tensor, bias: Tensor, states: Tensor, sequences: StateSequences
) -> Tensor:
    """qkv [T, queries, keys and values of all heads side by side]; a and b [T, value heads], rows may lie apart: the
    decay is -rates softplus(a + bias), the strength sigmoid(b); rates and bias [value heads] float32; states
    [num_blocks, value heads, key_size, value_size] float32 -> [T, value heads, value_size] in the type of qkv."""
    return kernel_or_torch(qkv, _delta_triton, _delta_torch)(qkv, a, b, rates, bias, states, sequences)


def _num_keys(qkv: Tensor, states: Tensor) -> int:
    """Heads of queries and keys."""
    _, num_values, key_size, value_size = states.shape
    return (qkv.shape[1] - num_values * value_size) // (2 * key_size)


# ---- in torch --------------------------------------------------------------------------------------------------------


def _delta_torch(
    qkv: Tensor, a: Tensor, b: Tensor, rates: Tensor, bias: Tensor, states: Tensor, sequences: StateSequences
) -> Tensor:
    _, num_values, key_size, value_size = states.shape
    num_keys, wide = _num_keys(qkv, states), qkv.float()
    q, k, v = wide.split((num_keys * key_size, num_keys * key_size, num_values * value_size), dim=1)
    q, k = (_normed(each.unflatten(1, (num_keys, key_size)), num_values // num_keys) for each in (q, k))
    q, v = q * key_size**-0.5, v.unflatten(1, (num_values, value_size))
    decays, strengths = -rates * F.softplus(a.float() + bias), b.float().sigmoid()
    out = torch.zeros_like(v)
    singles = sequences.singles
    here = singles.tokens
    before = states[singles.read].masked_fill_(singles.is_first[:, None, None, None], 0.0)
    out[here], after = _one_token(q[here], k[here], v[here], decays[here], strengths[here], before)
    states[singles.write] = after
    for stretch in sequences.stretches:
        state = torch.zeros_like(states[0]) if stretch.read is None else states[stretch.read]
        for first in range(stretch.first, stretch.last, PIECE):
            piece = slice(first, min(first + PIECE, stretch.last))
            out[piece], state = _piece(q[piece], k[piece], v[piece], decays[piece], strengths[piece], state)
        states[stretch.write] = state
    return out.to(qkv.dtype)


def _normed(x: Tensor, repeats: int) -> Tensor:
    """[T, heads, size] -> [T, repeats * heads, size], of length one."""
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)).repeat_interleave(repeats, dim=1)


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor, strengths: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Of m sequences: q and k [m, heads, key_size], v [m, heads, value_size], decays and strengths [m, heads], states
    [m, heads, key_size, value_size] -> what they read, like v, and the states after it."""
    states = states * decays.exp()[:, :, None, None]
    known = (k[:, :, None] @ states)[:, :, 0]
    states = states + k[:, :, :, None] * (strengths[:, :, None] * (v - known))[:, :, None]
    return (q[:, :, None] @ states)[:, :, 0], states


def _piece(q: Tensor, k: Tensor, v: Tensor, decays: Tensor, strengths: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same of t tokens of one sequence, q to `strengths` [t, ...], state [heads, key_size, value_size].

    With G the sum of the decays up to a token, the corrections d of all tokens solve a triangular system:
    d_t + s_t sum_{u<t} exp(G_t - G_u) (k_t k_u) d_u = s_t (v_t - exp(G_t) S^T k_t).
    """
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))  # [heads, t, ...]
    total = decays.T.cumsum(1)[:, :, None]
    strengths, reach = strengths.T[:, :, None], total.exp()
    # What is left at a token of a correction at an earlier one; of a later one nothing.
    left = (total - total.transpose(1, 2)).tril().exp().tril()
    system = strengths * left * (k @ k.transpose(1, 2))
    wanted = strengths * (v - reach * (k @ state))
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = reach * (q @ state) + (left * (q @ k.transpose(1, 2))) @ corrections
    state = reach[:, -1:] * state + (left[:, -1, :, None] * k).transpose(1, 2) @ corrections
    return out.transpose(0, 1), state


# ---- in Triton -------------------------------------------------------------------------------------------------------


def _delta_triton(
    qkv: Tensor, a: Tensor, b: Tensor, rates: Tensor, bias: Tensor, states: Tensor, sequences: StateSequences
) -> Tensor:
    _, num_values, key_size, value_size = states.shape
    # Zeros where there is padding: behind it everything stays finite.
    out = torch.zeros((len(qkv), num_values, value_size), dtype=qkv.dtype, device=qkv.device)
    tile = min(TILE, next_power_of_two(value_size))
    grid = (len(sequences.rows), num_values, ceil_div(value_size, tile))
    _delta_kernel[grid](
        out, qkv, a, b, rates, bias, states, sequences.block_tables, sequences.rows, sequences.context_lens,
        sequences.firsts, sequences.counts, qkv.stride(0), a.stride(0), b.stride(0), sequences.block_tables.stride(0),
        sequences.block_size, key_size**-0.5, EPS, _num_keys(qkv, states), num_values, key_size, value_size,
        next_power_of_two(key_size), tile, num_warps=1,
    )  # fmt: skip
    return out


@jit_for_any("qkv_stride", "a_stride", "b_stride", "table_stride")
def _delta_kernel(
    out: Pointer, qkv: Pointer, a: Pointer, b: Pointer, rates: Pointer, bias: Pointer, states: Pointer, tables: Pointer,
    rows: Pointer, context_lens: Pointer, firsts: Pointer, counts: Pointer, qkv_stride: Scalar, a_stride: Scalar,
    b_stride: Scalar, table_stride: Scalar, block_size: Scalar, scale: Scalar, eps: Scalar, num_keys: constexpr,
    num_values: constexpr, key_size: constexpr, value_size: constexpr, padded_size: constexpr, tile: constexpr,
) -> None:  # fmt: skip
    """Some columns of the state of one head and one sequence, from token to token."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    context, first = tl.load(context_lens + sequence), tl.load(firsts + sequence).to(tl.int64)
    count = tl.where(context > 0, tl.load(counts + sequence), 0)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    key, column = tl.arange(0, padded_size), tl.program_id(2) * tile + tl.arange(0, tile)
    is_key, is_value = key < key_size, column < value_size
    query_place = head // (num_values // num_keys) * key_size + key
    value_place = 2 * num_keys * key_size + head * value_size + column
    place = (head * key_size + key[:, None]) * value_size + column[None, :]
    whole = is_key[:, None] & is_value[None, :]
    block_numbers: tl.constexpr = num_values * key_size * value_size
    rate, shift = tl.load(rates + head), tl.load(bias + head)
    position = context - count
    state = tl.zeros((padded_size, tile), tl.float32)
    if (position > 0) & (count > 0):
        block = tl.load(table + (position - 1) // block_size).to(tl.int64)
        state = tl.load(states + block * block_numbers + place, whole, other=0.0)
    for number in range(count):
        token = first + number
        line = qkv + token * qkv_stride
        q = tl.load(line + query_place, is_key, other=0.0).to(tl.float32)
        k = tl.load(line + num_keys * key_size + query_place, is_key, other=0.0).to(tl.float32)
        v = tl.load(line + value_place, is_value, other=0.0).to(tl.float32)
        q = q * (scale * tl.rsqrt(tl.sum(q * q, 0) + eps))
        k = k * tl.rsqrt(tl.sum(k * k, 0) + eps)
        raw = tl.load(a + token * a_stride + head).to(tl.float32) + shift
        time = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(raw)))  # softplus, as torch has it
        strength = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
        state = state * tl.exp(-rate * time)
        correction = strength * (v - tl.sum(state * k[:, None], 0))
        state = state + k[:, None] * correction[None, :]
        read = tl.sum(state * q[:, None], 0)
        result = out + (token * num_values + head) * value_size + column
        tl.store(result, read.to(out.dtype.element_ty), is_value)
        here = position + number
        if (number == count - 1) | ((here + 1) % block_size == 0):
            block = tl.load(table + here // block_size).to(tl.int64)
            tl.store(states + block * block_numbers + place, state, whole)
