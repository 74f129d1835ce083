"""Attention of prompt chunks on Hopper GPUs: TMA loads the pages, and two warp groups compute.

The tiles are those of `chunk_attention`, and so are the results but for the last bit. Of the nine warps of a program
one asks the copy unit for the pages of keys and values, two stages ahead. Two groups of four take 64 rows of the tile
each; while one of them is busy with its softmax, the matrix units work for the other, and within a group they mix the
values of one step while the softmax of the next is computed. Pages go to their places in a tile of shared memory one by
one: nothing is gathered in between, and it takes no memory of the device.

Written in Gluon, Triton's language for those who say themselves which warp does what. It has no interpreter: tests
compile it everywhere and run it where there is such a GPU.
"""

from __future__ import annotations

from torch import Tensor

from legato.kernels.attention.hopper_tile import find_tile, hide_unknown, rows_of_tile, store_part, weigh
from legato.kernels.attention.tiles import MIN_BLOCKS, merge_parts, new_parts, split_plan
from legato.kernels.device import limits_of
from legato.kernels.gluon import (
    TensorDescriptor,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from legato.kernels.language import Pointer, Scalar, constexpr
from legato.kernels.overlap import launch_options
from legato.kernels.paged_kv import PagedKV, Scoring

BLOCK_M = 128  # rows of a tile, half of them for each group of warps: tokens times query heads per key-value head
STAGES = 2  # tiles of keys, and of values, in shared memory
# Fewer rows of a sequence, on average, leave most of a tile empty, of which a multiprocessor has only one at a time.
FEWEST_ROWS = 64
LOG2E = 1.4426950408889634


def suits(q: Tensor, kv: PagedKV, scoring: Scoring) -> bool:
    """Whether this kernel can do it and is faster than the one for any GPU.

    On an H200, 32 query and 8 key heads of 128: 2,048 tokens behind 0 / 2,048 / 30,720 / 129,024 others take 84 / 186 /
    1,573 / 7,158 µs instead of 111 / 281 / 2,959 / 12,243; 16 tokens of each of 32 sequences behind 500 as long as with
    the other (43 µs), 4 tokens of each of 64 sequences 61 instead of 46.
    """
    (num_tokens, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, kv.k_cache.shape
    plain = scoring.alibi_slopes is None and scoring.sinks is None and not scoring.window and not scoring.soft_cap
    return (
        plain
        and scoring.scale > 0
        # The copy unit brings pages as they are, in pieces of 64 numbers, of which the matrix units want eight rows.
        and kv.k_cache.dtype == q.dtype
        and q.dtype.itemsize == 2
        and head_dim in (64, 128, 256)
        and block_size % 8 == 0
        and block_size & (block_size - 1) == 0
        and num_heads // num_kv_heads <= BLOCK_M
        and num_tokens * (num_heads // num_kv_heads) >= FEWEST_ROWS * kv.num_sequences
        and gl is not None
        and limits_of(q).sm == 90
    )


def hopper_attention(q: Tensor, kv: PagedKV, cu_seqlens_q: Tensor, scoring: Scoring, out: Tensor) -> Tensor:
    """As `chunk_attention`, for whatever `suits`."""
    (num_tokens, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, kv.k_cache.shape
    group = num_heads // num_kv_heads
    # As in `chunk_config` 128, wherever the sums of a thread leave it the registers.
    block_n = 128 if head_dim <= 128 else 64
    page = min(block_size, block_n)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_pages, v_pages = (
        TensorDescriptor.from_tensor(cache.view(-1, num_kv_heads * head_dim), [page, 64], layout)
        for cache in (kv.k_cache, kv.v_cache)
    )
    num_tiles = num_tokens // (BLOCK_M // group) + kv.num_sequences
    plan = split_plan(num_tiles, num_kv_heads, limits_of(q).num_multiprocessors)
    parts = new_parts(plan, num_kv_heads, BLOCK_M, head_dim, q.device)
    _hopper_kernel[(num_kv_heads, num_tiles - plan.num_tiles + plan.num_parts)](
        out,
        parts,
        q,
        k_pages,
        v_pages,
        kv.block_tables,
        kv.context_lens,
        kv.rows,
        cu_seqlens_q,
        kv.num_sequences,
        plan.num_tiles,
        plan.num_splits,
        q.stride(0),
        kv.block_tables.stride(0),
        SCALE=scoring.scale * LOG2E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        PAGE=page,
        BLOCK_N=block_n,
        STAGES=STAGES,
        MIN_BLOCKS=MIN_BLOCKS,
        num_warps=4,
        **launch_options(q),
    )
    if plan.num_tiles:
        merge_parts(parts, plan, kv, cu_seqlens_q, out, BLOCK_M, block_n)
    return out


@gluon_jit("context_lens", "rows", "cu_seqlens_q", "num_sequences", "num_split_tiles", "num_splits")
def _hopper_kernel(
    out: Pointer,
    parts: Pointer,
    q: Pointer,
    k_pages: Pointer,
    v_pages: Pointer,
    block_tables: Pointer,
    context_lens: Pointer,
    rows: Pointer,
    cu_seqlens_q: Pointer,
    num_sequences: Scalar,
    num_split_tiles: Scalar,
    num_splits: Scalar,
    q_stride: Scalar,
    table_stride: Scalar,
    SCALE: constexpr,
    NUM_KV_HEADS: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    PAGE: constexpr,
    BLOCK_N: constexpr,
    STAGES: constexpr,
    MIN_BLOCKS: constexpr,
    OVERLAP: constexpr,
) -> None:
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = gl.program_id(0)
    # The last tiles of a sequence have the longest contexts: they start first, so that no long one is left to the end.
    place = gl.program_id(1)
    num_whole = gl.num_programs(1) - num_split_tiles * num_splits
    tile = num_whole + num_split_tiles - 1 - place
    split = 0
    splits = 1
    if place >= num_whole:
        tile = num_split_tiles - 1 - (place - num_whole) // num_splits
        split = (place - num_whole) % num_splits
        splits = num_splits
    tokens: gl.constexpr = 128 // GROUP
    sequence, first_query, num_queries, first_token = find_tile(tile, cu_seqlens_q, num_sequences, tokens)
    context_len = gl.load(context_lens + sequence)
    if (first_token >= num_queries) | (context_len == 0):
        return
    row = sequence
    if rows is not None:
        row = gl.load(rows + sequence)
    block_table = block_tables + row.to(gl.int64) * table_stride
    first_position = context_len - num_queries + first_token
    last_position = first_position + gl.minimum(tokens, num_queries - first_token) - 1

    # Blocks of keys [begin, end) are this program's. `part` is where their sums go; negative: they are the whole tile.
    num_blocks = last_position // BLOCK_N + 1
    part = -1
    if num_blocks < MIN_BLOCKS * splits:
        if split > 0:
            return
        splits = 1
    elif splits > 1:
        part = (tile * num_splits + split) * NUM_KV_HEADS + kv_head
    begin = num_blocks * split // splits
    end = num_blocks * (split + 1) // splits

    # A tile lies in shared memory in bands of 64 columns, one behind the other, as the matrix units want it.
    bands: gl.constexpr = HEAD_DIM // 64
    dtype: gl.constexpr = k_pages.dtype
    shared: gl.constexpr = k_pages.layout
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], shared)
    k_bands = gl.allocate_shared_memory(dtype, [STAGES * bands, BLOCK_N, 64], shared)
    v_bands = gl.allocate_shared_memory(dtype, [STAGES * bands, BLOCK_N, 64], shared)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)  # by each of the groups
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_compute, (
                out, parts, q, q_tiles.index(0), k_bands, v_bands, k_ready, v_ready, k_free, v_free, kv_head,
                first_query, num_queries, first_token, first_position, last_position, begin, end, part, q_stride,
                0, SCALE, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_N, STAGES,
            )),
            (_compute, (
                out, parts, q, q_tiles.index(1), k_bands, v_bands, k_ready, v_ready, k_free, v_free, kv_head,
                first_query, num_queries, first_token, first_position, last_position, begin, end, part, q_stride,
                1, SCALE, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_N, STAGES,
            )),
            (_fetch, (
                k_pages, v_pages, k_bands, v_bands, k_ready, v_ready, k_free, v_free, block_table, kv_head,
                last_position, begin, end, HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],  # warps of the second group and of the one that fetches
        [232, 40],  # their registers
    )
    # fmt: on


@gluon_jit()
def _fetch(
    k_pages: Pointer,
    v_pages: Pointer,
    k_bands: Pointer,
    v_bands: Pointer,
    k_ready: Pointer,
    v_ready: Pointer,
    k_free: Pointer,
    v_free: Pointer,
    block_table: Pointer,
    kv_head: Scalar,
    last_position: Scalar,
    begin: Scalar,
    end: Scalar,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    PAGE: constexpr,
    BLOCK_N: constexpr,
    STAGES: constexpr,
) -> None:
    column = kv_head * HEAD_DIM
    for i in range(end - begin):
        stage = i % STAGES
        # The first round waits for the phase before the first, which counts as over.
        before = ((i // STAGES) & 1) ^ 1
        first_page = (begin + i) * (BLOCK_N // PAGE)
        last_page = last_position // PAGE
        mbarrier.wait(k_free.index(stage), before)
        _fetch_tile(
            k_pages, k_bands, k_ready, stage, block_table, first_page, last_page, column,
            HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_N,
        )  # fmt: skip
        mbarrier.wait(v_free.index(stage), before)
        _fetch_tile(
            v_pages, v_bands, v_ready, stage, block_table, first_page, last_page, column,
            HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_N,
        )  # fmt: skip


@gluon_jit()
def _fetch_tile(
    pages: Pointer,
    bands: Pointer,
    ready: Pointer,
    stage: Scalar,
    block_table: Pointer,
    first_page: Scalar,
    last_page: Scalar,
    column: Scalar,
    HEAD_DIM: constexpr,
    BLOCK_SIZE: constexpr,
    PAGE: constexpr,
    BLOCK_N: constexpr,
) -> None:
    """BLOCK_N rows of one head, page by page. Behind the last page the last is read again."""
    mbarrier.expect(ready.index(stage), BLOCK_N * HEAD_DIM * 2)
    for p in gl.static_range(BLOCK_N // PAGE):
        page = gl.minimum(first_page + p, last_page)
        block = gl.load(block_table + page * PAGE // BLOCK_SIZE)
        slot = block * BLOCK_SIZE + page * PAGE % BLOCK_SIZE
        for band in gl.static_range(HEAD_DIM // 64):
            place = bands.index(stage * (HEAD_DIM // 64) + band).slice(p * PAGE, PAGE, dim=0)
            tma.async_copy_global_to_shared(pages, [slot, column + band * 64], ready.index(stage), place)


# fmt: off
@gluon_jit()
def _compute(
    out: Pointer, parts: Pointer, q: Pointer, q_tile: Pointer, k_bands: Pointer, v_bands: Pointer,
    k_ready: Pointer, v_ready: Pointer, k_free: Pointer, v_free: Pointer,
    kv_head: Scalar, first_query: Scalar, num_queries: Scalar, first_token: Scalar,
    first_position: Scalar, last_position: Scalar, begin: Scalar, end: Scalar, part: Scalar, q_stride: Scalar,
    WARP_GROUP: constexpr, SCALE: constexpr, NUM_KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr,
    BLOCK_N: constexpr, STAGES: constexpr,
) -> None:
    # fmt: on
    """64 rows of the tile. Scores of step i are computed while the values of step i - 1 are mixed."""
    dtype: gl.constexpr = k_bands.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mixed_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, mixed_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    offsets, inside = rows_of_tile(
        first_query, num_queries, first_token, kv_head, WARP_GROUP, GROUP, q_stride, HEAD_DIM, load_layout
    )
    q_tile.store(gl.load(q + offsets, mask=inside, other=0.0))
    fence_async_shared()
    k_tiles = k_bands._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], k_bands.layout)
    v_tiles = v_bands._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], v_bands.layout)

    query_position = first_position + (WARP_GROUP * 64 + gl.arange(0, 64, layout=rows_layout)) // GROUP
    maximum = gl.full([64], -1.0e30, gl.float32, rows_layout)
    total = gl.zeros([64], gl.float32, rows_layout)
    mixed = gl.zeros([64, HEAD_DIM], gl.float32, mixed_layout)
    nothing = gl.zeros([64, BLOCK_N], gl.float32, scores_layout)
    mbarrier.wait(k_ready.index(0), 0)
    dots = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    dots = warpgroup_mma_wait(0, deps=[dots])
    mbarrier.arrive(k_free.index(0), count=1)
    weights, _, maximum, total = weigh(
        dots, begin * BLOCK_N, query_position, first_position, maximum, total, SCALE, BLOCK_N
    )
    weights = gl.convert_layout(weights.to(dtype), weights_layout)
    last = end - begin - 1
    for i in range(1, last + 1):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), (i // STAGES) & 1)
        dots = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), ((i - 1) // STAGES) & 1)
        mixing = warpgroup_mma(weights, v_tiles.index(before), mixed, is_async=True)
        dots = warpgroup_mma_wait(1, deps=[dots])
        mbarrier.arrive(k_free.index(stage), count=1)
        following, decay, maximum, total = weigh(
            dots, (begin + i) * BLOCK_N, query_position, first_position, maximum, total, SCALE, BLOCK_N
        )
        # The matrix units read the weights from registers: they are kept until the product is there.
        mixed, weights = warpgroup_mma_wait(0, deps=[mixing, weights])
        mbarrier.arrive(v_free.index(before), count=1)
        mixed = mixed * gl.convert_layout(decay, gl.SliceLayout(1, mixed_layout))[:, None]
        weights = gl.convert_layout(following.to(dtype), weights_layout)
    mbarrier.wait(v_ready.index(last % STAGES), (last // STAGES) & 1)
    hide_unknown(v_bands, last % STAGES, last_position - (end - 1) * BLOCK_N, HEAD_DIM, BLOCK_N)
    mixing = warpgroup_mma(weights, v_tiles.index(last % STAGES), mixed, is_async=True)
    mixed, weights = warpgroup_mma_wait(0, deps=[mixing, weights])

    if part >= 0:
        store_part(parts, part, mixed, maximum, total, WARP_GROUP)
        return
    mixed = mixed / gl.convert_layout(total, gl.SliceLayout(1, mixed_layout))[:, None]
    stride: gl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
    offsets, inside = rows_of_tile(
        first_query, num_queries, first_token, kv_head, WARP_GROUP, GROUP, stride, HEAD_DIM, mixed_layout
    )
    gl.store(out + offsets, mixed.to(dtype), mask=inside)
