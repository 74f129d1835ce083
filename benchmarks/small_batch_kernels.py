"""Candidates for decode steps of 2 to 16 rows, timed by `benchmarks.small_batches`. The server does not use them.

- `chained_linear`: `few_linear` that adds to the residual stream, leaves sums of squares, and normalizes what it reads:
  no launch for the norm between two products.
- `turned_attention`: decode attention that turns queries and keys and stores keys and values itself, and has its first
  keys and values on their way before the projection is done.
- `pair_linear`: multiply-adds for 2 to 4 rows, as `small_linear` does for one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.activation import Activation, gate_and_up, weight_rows
from legato.kernels.arrival import arrival_counters, arrives_last
from legato.kernels.attention.decode import DecodeConfig, _merge, _store_part, _store_whole, decode_config
from legato.kernels.attention.splits import choose_split_len, find_sequence, shortest_split_len, splits_before
from legato.kernels.few_linear import FewConfig, _load_block, few_config
from legato.kernels.language import (
    Pointer,
    Scalar,
    ceil_div,
    constexpr,
    jit,
    jit_for_any,
    next_power_of_two,
    padded,
    tl,
)
from legato.kernels.overlap import launch_options, wait_for_previous
from legato.kernels.paged_kv import PagedKV, Scoring, cache_offsets, find_table, lowest_scores
from legato.kernels.rotary import _rounded_sum


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream behind a product: [m, hidden], and what its squares sum to in each tile of the product."""

    total: Tensor
    squares: Tensor  # [tiles, rows of x, padded] float32


@jit
def request_lines(pointers: Pointer) -> None:
    """Ask for the lines at these addresses to be brought into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


def chained_linear(
    x: Tensor | Stream,
    weight: Tensor,
    norm: tuple[Tensor, float] | None = None,  # of a stream: weight and eps
    residual: Tensor | None = None,  # added to and overwritten; the result is a stream
    activation: Activation | None = None,
    config: FewConfig | None = None,
    prefetch: int = 0,  # columns behind the first block, requested before the wait
) -> Tensor | Stream:
    numbers = x.total if isinstance(x, Stream) else x
    assert isinstance(x, Stream) == (norm is not None)
    (num_rows, in_features), width = numbers.shape, weight.shape[0]
    config = config or few_config(num_rows, width, in_features)
    rows = next_power_of_two(num_rows, 8)
    num_tiles, split_k = ceil_div(width, config.tile_rows), config.split_k
    out_width = width if activation is None else width // 2
    if residual is None:
        out, squares = torch.empty(num_rows, out_width, dtype=numbers.dtype, device=numbers.device), None
    else:
        out = residual
        squares = torch.empty(num_tiles, rows, dtype=torch.float32, device=numbers.device)
    part_size = config.tile_rows * rows if split_k > 1 else 0
    _chained_kernel[(num_tiles, split_k)](
        out,
        numbers,
        weight,
        norm[0] if norm is not None else None,
        x.squares if isinstance(x, Stream) else None,
        squares,
        torch.empty(num_tiles, split_k, part_size, dtype=torch.float32, device=numbers.device),
        arrival_counters(numbers.device),
        norm[1] if norm is not None else 0.0,
        numbers.stride(0),
        num_rows,
        ROWS=rows,
        WIDTH=width,
        IN_FEATURES=in_features,
        TILE_ROWS=config.tile_rows,
        BLOCK_K=config.block_k,
        SPLIT_K=split_k,
        NUM_SQUARES=x.squares.shape[0] if isinstance(x, Stream) else 0,
        ADD=residual is not None,
        ACTIVATION=activation,
        PREFETCH=prefetch,
        num_warps=config.num_warps,
        **launch_options(numbers),
    )
    return out if squares is None else Stream(out, squares)


@jit_for_any("num_rows")
def _chained_kernel(
    out: Pointer,
    x: Pointer,
    weight: Pointer,
    norm_weight: Pointer,
    squares: Pointer,
    new_squares: Pointer,
    parts: Pointer,
    counters: Pointer,
    eps: float,
    x_stride: Scalar,
    num_rows: Scalar,
    ROWS: constexpr,
    WIDTH: constexpr,
    IN_FEATURES: constexpr,
    TILE_ROWS: constexpr,
    BLOCK_K: constexpr,
    SPLIT_K: constexpr,
    NUM_SQUARES: constexpr,
    ADD: constexpr,
    ACTIVATION: constexpr,
    PREFETCH: constexpr,
    OVERLAP: constexpr,
) -> None:
    tile = tl.program_id(0)
    split = tl.program_id(1)
    split_len: tl.constexpr = tl.cdiv(IN_FEATURES, SPLIT_K * BLOCK_K) * BLOCK_K
    begin = split * split_len
    end = tl.minimum(begin + split_len, IN_FEATURES)
    r = tl.arange(0, TILE_ROWS)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    row = weight_rows(tile, TILE_ROWS, WIDTH, ACTIVATION)
    rows = weight + row.to(tl.int64)[:, None] * IN_FEATURES + k[None, :]
    x_rows = x + (tl.minimum(m, num_rows - 1) * x_stride)[None, :] + k[:, None]
    product = tl.zeros((TILE_ROWS, ROWS), dtype=tl.float32)
    weights = _load_block(rows, k[None, :], begin, end, IN_FEATURES, BLOCK_K, "evict_first")
    if PREFETCH > 0:
        line = tl.arange(0, PREFETCH // 64)
        behind = weight + row.to(tl.int64)[:, None] * IN_FEATURES + begin + BLOCK_K + line[None, :] * 64
        request_lines(behind)
    scale = tl.zeros((BLOCK_K, 1), dtype=tl.float32)
    rms = tl.zeros((1, ROWS), dtype=tl.float32)
    if NUM_SQUARES > 0:
        scale = tl.load(norm_weight + begin + k).to(tl.float32)[:, None]
    wait_for_previous(OVERLAP)
    if NUM_SQUARES > 0:
        t = tl.arange(0, padded(NUM_SQUARES, 1))
        sums = tl.load(squares + t[:, None] * ROWS + m[None, :], mask=(t < NUM_SQUARES)[:, None], other=0.0)
        rms = tl.rsqrt(tl.sum(sums, axis=0) / IN_FEATURES + eps)[None, :]
    values = _load_block(x_rows, k[:, None], begin, end, IN_FEATURES, BLOCK_K, "evict_last")
    for start in tl.range(begin, end, BLOCK_K, num_stages=1):
        next_values = _load_block(x_rows, k[:, None], start + BLOCK_K, end, IN_FEATURES, BLOCK_K, "evict_last")
        next_weights = _load_block(rows, k[None, :], start + BLOCK_K, end, IN_FEATURES, BLOCK_K, "evict_first")
        if NUM_SQUARES > 0:
            values = (values.to(tl.float32) * rms * scale).to(weights.dtype)
            column = tl.minimum(start + BLOCK_K, IN_FEATURES - BLOCK_K) + k
            scale = tl.load(norm_weight + column).to(tl.float32)[:, None]
        product = tl.dot(weights, values, product, input_precision="ieee")
        weights = next_weights
        values = next_values
    if SPLIT_K == 1:
        _store(out, new_squares, tile, product, num_rows, WIDTH, ACTIVATION, ADD)
    else:
        place = r[:, None] * ROWS + m[None, :]
        size: tl.constexpr = TILE_ROWS * ROWS
        tl.store(parts + (tile * SPLIT_K + split) * size + place, product)
        if arrives_last(counters + tile, SPLIT_K):
            product = tl.zeros((TILE_ROWS, ROWS), dtype=tl.float32)
            for i in tl.static_range(SPLIT_K):
                product += tl.load(parts + (tile * SPLIT_K + i) * size + place, cache_modifier=".cg")
            _store(out, new_squares, tile, product, num_rows, WIDTH, ACTIVATION, ADD)


@jit
def _store(
    out: Pointer,
    squares: Pointer,
    tile: Scalar,
    product: Scalar,
    num_rows: Scalar,
    WIDTH: constexpr,
    ACTIVATION: constexpr,
    ADD: constexpr,
) -> None:
    out_width: tl.constexpr = WIDTH if ACTIVATION is None else WIDTH // 2
    rounded = product.to(out.dtype.element_ty)
    if ACTIVATION is not None:
        rounded = gate_and_up(rounded, ACTIVATION)
    feature = tile * rounded.shape[0] + tl.arange(0, rounded.shape[0])[:, None]
    m = tl.arange(0, rounded.shape[1])
    mask = (feature < out_width) & (m < num_rows)[None, :]
    pointers = out + m[None, :] * out_width + feature
    if ADD:
        wide = rounded.to(tl.float32) + tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(out.dtype.element_ty)
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        tl.store(squares + tile * rounded.shape[1] + m, tl.sum(wide * wide, axis=0))
    tl.store(pointers, rounded, mask=mask)


def turned_attention(
    qkv: Tensor,  # [n, (num_heads + 2 * num_kv_heads) * head_dim]; read only
    angles: Tensor,  # [positions, head_dim]
    kv: PagedKV,
    slots: Tensor,
    scoring: Scoring,
    config: DecodeConfig | None = None,
    prefetch: Tensor | None = None,  # a weight whose last bytes the programs that are left over ask for
) -> Tensor:
    num_kv_heads, head_dim = kv.k_cache.shape[2:]
    num_sequences, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
    config = config or decode_config(num_sequences, num_kv_heads)
    out = torch.empty(num_sequences, num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    num_splits = num_sequences + config.extra_splits
    _turned_kernel[(num_kv_heads, num_splits)](
        out,
        qkv,
        angles,
        kv.k_cache,
        kv.v_cache,
        kv.block_tables,
        kv.context_lens,
        kv.rows,
        slots,
        torch.empty(num_splits * num_heads, head_dim + 4, dtype=torch.float32, device=qkv.device),
        arrival_counters(qkv.device),
        prefetch,
        num_sequences,
        qkv.stride(0),
        kv.block_tables.stride(0),
        config.extra_splits,
        config.min_split_len,
        **kv.constants(),
        SCALE=scoring.scale,
        GROUP=num_heads // num_kv_heads,
        BLOCK_N=config.block_n,
        SCAN=32 if num_sequences <= 32 else 128,
        SINGLE=num_sequences == 1,
        WEIGHT_SIZE=0 if prefetch is None else prefetch.numel(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
        **launch_options(qkv),
    )
    return out


@jit_for_any("context_lens", "rows", "slots", "num_sequences", "extra_splits", "min_split_len")
def _turned_kernel(
    out: Pointer,
    qkv: Pointer,
    angles: Pointer,
    k_cache: Pointer,
    v_cache: Pointer,
    block_tables: Pointer,
    context_lens: Pointer,
    rows: Pointer,
    slots: Pointer,
    parts: Pointer,
    counters: Pointer,
    prefetched: Pointer,
    num_sequences: Scalar,
    qkv_stride: Scalar,
    table_stride: Scalar,
    extra_splits: Scalar,
    min_split_len: Scalar,
    NUM_KV_HEADS: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    BLOCK_N: constexpr,
    SCAN: constexpr,
    SINGLE: constexpr,
    SCALE: constexpr,
    WEIGHT_SIZE: constexpr,
    WIDE: constexpr,
    OVERLAP: constexpr,
) -> None:
    """Lengths, tables and older keys are from earlier steps, so programs read them before they wait."""
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    split = 0
    if SINGLE:
        sequence = 0
        split = tl.program_id(1)
        length = tl.load(context_lens)
        split_len = shortest_split_len(length, extra_splits, min_split_len, BLOCK_N)
        is_left_over = (split > 0) & (split * split_len >= length)
    else:
        split_len = choose_split_len(context_lens, num_sequences, extra_splits, min_split_len, BLOCK_N, 0, SCAN)
        if sequence >= num_sequences:
            place = sequence - num_sequences
            sequence, first_place = find_sequence(place, context_lens, num_sequences, split_len, 0, SCAN)
            split = 1 + place - first_place
        is_left_over = sequence >= num_sequences
    if is_left_over:
        if WEIGHT_SIZE > 0:
            wait_for_previous(OVERLAP)
            from_last = (num_sequences + extra_splits - tl.program_id(1)) * NUM_KV_HEADS - kv_head
            request_lines(prefetched + tl.maximum(WEIGHT_SIZE - from_last * 8192, 0) + tl.arange(0, 128) * 64)
        return
    context_len = tl.load(context_lens + sequence)
    block_table = find_table(block_tables, rows, sequence, table_stride)
    begin = split * split_len
    end = tl.minimum(begin + split_len, context_len)
    last = context_len - 1
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_DIM)
    half: tl.constexpr = HEAD_DIM // 2
    other = (d + half) % HEAD_DIM
    column = (kv_head * HEAD_DIM + d)[None, :]
    # The newest key and value are not in the cache yet: they are where sums begin.
    old_end = tl.minimum(end, last)
    position = begin + n
    offsets = _offsets(block_table, position, old_end, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, WIDE)
    is_old = (position < old_end)[:, None]
    keys = tl.load(k_cache + offsets + column, mask=is_old, other=0.0)
    values = tl.load(v_cache + offsets + column, mask=is_old, other=0.0)
    cos = tl.load(angles + last * HEAD_DIM + d % half).to(tl.float32)
    sin = tl.load(angles + last * HEAD_DIM + half + d % half).to(tl.float32)
    sin = tl.where(d < half, -sin, sin)
    slot = tl.load(slots + sequence).to(tl.int64)
    wait_for_previous(OVERLAP)
    row = qkv + sequence * qkv_stride
    h = tl.arange(0, padded(GROUP, 16))
    inside = (h < GROUP)[:, None]
    heads = row + (kv_head * GROUP + h)[:, None] * HEAD_DIM
    query = tl.load(heads + d[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(heads + other[None, :], mask=inside, other=0.0).to(tl.float32)
    query = _rounded_sum(query * cos[None, :], partner * sin[None, :], qkv.dtype.element_ty)
    new_key = row + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_DIM
    key = tl.load(new_key + d).to(tl.float32)
    key_partner = tl.load(new_key + other).to(tl.float32)
    key = _rounded_sum(key * cos, key_partner * sin, qkv.dtype.element_ty)
    value = tl.load(new_key + NUM_KV_HEADS * HEAD_DIM + d)
    maximum = lowest_scores(query.shape[0])
    total = tl.zeros((query.shape[0],), dtype=tl.float32)
    mixed = tl.zeros(query.shape, dtype=tl.float32)
    if end == context_len:
        place = slot * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + d
        tl.store(k_cache + place, key, mask=slot >= 0)
        tl.store(v_cache + place, value, mask=slot >= 0)
        dots = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1)
        maximum = dots * (SCALE * 1.4426950408889634)
        total += 1.0
        mixed += value.to(tl.float32)[None, :]
    mixed, maximum, total = _attend_block(query, keys, values, position, old_end, mixed, maximum, total, SCALE)
    for start in range(begin + BLOCK_N, old_end, BLOCK_N):
        position = start + n
        offsets = _offsets(block_table, position, old_end, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, WIDE)
        keys = tl.load(k_cache + offsets + column)
        values = tl.load(v_cache + offsets + column)
        mixed, maximum, total = _attend_block(query, keys, values, position, old_end, mixed, maximum, total, SCALE)
    pair = sequence * NUM_KV_HEADS + kv_head
    if context_len <= split_len:
        _store_whole(out, pair, mixed, total, GROUP, HEAD_DIM)
    else:
        parts += kv_head * (num_sequences + extra_splits) * GROUP * (HEAD_DIM + 4)
        _store_part(parts, tl.program_id(1), mixed, maximum, total, GROUP, HEAD_DIM)
        num_parts = tl.cdiv(context_len, split_len)
        if arrives_last(counters + pair, num_parts):
            first_extra = num_sequences
            if not SINGLE:
                first_extra += splits_before(sequence, context_lens, num_sequences, split_len, 0, SCAN)
            _merge(out, parts, pair, sequence, first_extra, num_parts, GROUP, HEAD_DIM)


@jit
def _offsets(
    block_table: Pointer,
    position: Scalar,
    end: Scalar,
    BLOCK_SIZE: constexpr,
    SLOT_WIDTH: constexpr,
    WIDE: constexpr,
) -> Scalar:
    known = tl.maximum(tl.minimum(position, end - 1), 0)
    return cache_offsets(block_table, known, BLOCK_SIZE, SLOT_WIDTH, WIDE)[:, None]


@jit
def _attend_block(
    query: Scalar,
    keys: Scalar,
    values: Scalar,
    position: Scalar,
    end: Scalar,
    mixed: Scalar,
    maximum: Scalar,
    total: Scalar,
    SCALE: constexpr,
) -> Scalar:
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (SCALE * 1.4426950408889634)
    scores = tl.where((position < end)[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)
    total = total * decay + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
    return mixed, new_maximum, total
