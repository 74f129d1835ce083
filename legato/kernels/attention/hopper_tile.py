"""Parts of the Hopper attention kernel that concern one tile: its place, its rows, its softmax, its results."""

from __future__ import annotations

from legato.kernels.gluon import fence_async_shared, gl, gluon_jit
from legato.kernels.language import Pointer, Scalar, constexpr


@gluon_jit()
def find_tile(tile: Scalar, cu_seqlens_q: Pointer, num_sequences: Scalar, TOKENS: constexpr) -> Scalar:
    """As in `chunk_attention`, which explains it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    base = gl.load(cu_seqlens_q)
    found = 0
    for first in range(0, num_sequences, 128):
        i = first + gl.arange(0, 128, layout=layout)
        start = gl.load(cu_seqlens_q + i, mask=i < num_sequences, other=1 << 30) - base
        found += gl.sum((start // TOKENS + i <= tile).to(gl.int32), axis=0)
    sequence = found - 1
    first_query = gl.load(cu_seqlens_q + sequence) - base
    num_queries = gl.load(cu_seqlens_q + sequence + 1) - base - first_query
    return sequence, first_query, num_queries, (tile - first_query // TOKENS - sequence) * TOKENS


@gluon_jit()
def store_part(
    parts: Pointer, part: Scalar, mixed: Scalar, maximum: Scalar, total: Scalar, WARP_GROUP: constexpr
) -> None:
    """As `merge_parts` reads it: the sums of 128 rows, their largest scores, their sums of weights."""
    head_dim: gl.constexpr = mixed.shape[1]
    base = parts + part.to(gl.int64) * (128 * (head_dim + 2))
    row = WARP_GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, mixed.type.layout))
    d = gl.arange(0, head_dim, layout=gl.SliceLayout(0, mixed.type.layout))
    gl.store(base + row[:, None] * head_dim + d[None, :], mixed)
    r = WARP_GROUP * 64 + gl.arange(0, 64, layout=maximum.type.layout)
    gl.store(base + 128 * head_dim + r, maximum)
    gl.store(base + 128 * (head_dim + 1) + r, total)


@gluon_jit()
def rows_of_tile(
    first_query: Scalar,
    num_queries: Scalar,
    first_token: Scalar,
    kv_head: Scalar,
    WARP_GROUP: constexpr,
    GROUP: constexpr,
    stride: Scalar,
    HEAD_DIM: constexpr,
    LAYOUT: constexpr,
) -> Scalar:
    """Offsets of the group's rows from the first query, tokens `stride` apart, and which of them there are."""
    r = WARP_GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    token = first_token + r // GROUP
    offsets = (first_query + token).to(gl.int64) * stride + (kv_head * GROUP + r % GROUP) * HEAD_DIM
    inside = (r < 128 // GROUP * GROUP) & (token < num_queries)
    return offsets[:, None] + d[None, :], inside[:, None]


@gluon_jit()
def weigh(
    dots: Scalar,
    start: Scalar,
    query_position: Scalar,
    first_position: Scalar,
    maximum: Scalar,
    total: Scalar,
    SCALE: constexpr,
    BLOCK_N: constexpr,
) -> Scalar:
    """Weights of the keys from `start` on, what the sums so far are worth beside them, largest score, sum of all."""
    if start + BLOCK_N > first_position + 1:
        position = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, dots.type.layout))
        dots = gl.where(position[None, :] <= query_position[:, None], dots, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(dots, axis=1) * SCALE)
    weights = gl.exp2(dots * SCALE - new_maximum[:, None])
    decay = gl.exp2(maximum - new_maximum)
    return weights, decay, new_maximum, total * decay + gl.sum(weights, axis=1)


@gluon_jit()
def hide_unknown(v_bands: Pointer, stage: Scalar, last: Scalar, HEAD_DIM: constexpr, BLOCK_N: constexpr) -> None:
    """Slots behind the last key may hold anything, even NaN, and zero times that is NaN: make zeros of them.

    Both groups do so, each before its own product. Neither writes anything but what is there or zero.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if last < BLOCK_N - 1:
        known = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout)) <= last
        for band in gl.static_range(HEAD_DIM // 64):
            place = v_bands.index(stage * (HEAD_DIM // 64) + band)
            place.store(gl.where(known[:, None], place.load(layout), 0.0))
        fence_async_shared()
