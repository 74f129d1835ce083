"""LoRA: what adapters add to a product, for rows that belong to different adapters.

    out[row] += scale[row] * B (A x[row]), with A and B of the row's adapter

Adapters are in pages of `PAGE_RANKS` ranks. A page holds, for each of its ranks, a row of A and a column of B of every
layer, so that one copy brings a page to the device. Rows are in groups by adapter (`grouped_linear.py`), rows without
one stand behind all groups and are not touched. Which row has which adapter, how many there are and what ranks they
have is known on the device alone: a CUDA graph that was captured with one adapter is right for any.

Two kernels: `shrink` multiplies with A, the inputs cut into pieces (few rows would leave most of the device idle), and
`expand` adds the pieces up, multiplies with B and adds to the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, jit, jit_for_any, kernel_or_torch, tl, widened
from legato.kernels.lora.pages import MAX_PARTS, PAGE_RANKS, LoraPages, LoraPlace
from legato.kernels.lora.tiles import LoraGroups, read_tile
from legato.kernels.overlap import launch_options, wait_for_previous


@dataclass(frozen=True, slots=True)
class LoraConfig:
    block_m: int  # rows per program
    block_n: int  # outputs per program of `expand`
    block_k: int  # inputs at a time
    block_r: int  # ranks at a time
    splits: int  # pieces of the inputs
    num_warps: int = 4
    num_stages: int = 3


def lora_config(num_rows: int, place: LoraPlace, max_rank: int, itemsize: int = 2) -> LoraConfig:
    """`splits` depends on the layer alone: the same row gives the same sums, whatever else is in the step. Wide blocks
    read B at the speed of the memory, and all of them fit the 64 KiB of shared memory that the smallest cards have."""
    splits = 8 if place.in_features >= 8192 else 4 if place.in_features >= 2048 else 1
    widest = max(place.out_sizes)
    return LoraConfig(
        block_m=16 if num_rows <= 1024 else 64,
        block_n=256 if widest >= 4096 and itemsize == 2 else 128 if widest >= 512 else 64,
        block_k=32 if itemsize > 2 else 128 if num_rows <= 1024 else 64,
        block_r=64 if max_rank > 32 else 32 if max_rank > 16 else 16,
        splits=splits,
        num_stages=3 if itemsize == 2 else 2,
    )


def lora_add(
    out: Tensor,  # [rows, out_features]: added to in place
    x: Tensor,  # [rows, in_features], or [rows / k, in_features] where k rows have the same input
    groups: LoraGroups,  # rows by slot, or by slot * num_experts + expert
    pages: LoraPages,
    place: LoraPlace,
    scale: Tensor | None = None,  # [rows]
    config: LoraConfig | None = None,
) -> Tensor:
    """Returns `out`."""
    assert out.shape == (groups.num_rows, place.out_features), (out.shape, groups.num_rows, place)
    assert x.shape[1] == place.in_features and x.dtype == pages.pages.dtype, (x.shape, x.dtype)
    assert out.stride(1) == 1 and x.stride(1) == 1 and place.num_parts <= MAX_PARTS, (out.stride(), x.stride())
    assert groups.rows.num_experts == pages.num_slots * place.num_experts, (groups.rows.num_experts, pages.num_slots)
    run = kernel_or_torch(x, _lora_add_triton, _lora_add_torch)
    return run(out, x, groups, pages, place, scale, config)


def lora_expand(out: Tensor, shrunk: Tensor, groups: LoraGroups, pages: LoraPages, place: LoraPlace) -> Tensor:
    """The second half of `lora_add`, for what is not a product with A: `shrunk` [rows, max_rank] float32."""
    run = kernel_or_torch(out, _lora_expand_triton, _lora_expand_torch)
    return run(out, shrunk, groups, pages, place)


def gather_ranks(ids: Tensor, slots: Tensor, pages: LoraPages, place: LoraPlace) -> Tensor:
    """For embeddings, whose A is a table [rank, in]: its columns `ids` [T], those of the adapters in `slots` [T]. ->
    [T, max_rank] float32, zero beyond the rank."""
    rank = torch.arange(pages.max_rank, device=ids.device)
    page = pages.table[slots].long().repeat_interleave(PAGE_RANKS, dim=1)
    within = place.a_begin + (rank % PAGE_RANKS) * place.in_features
    found = pages.pages.view(-1)[page * pages.pages.stride(0) + within + ids[:, None]]
    return found.float().masked_fill_(rank >= pages.ranks[place.index][slots][:, None], 0.0)


# ---- the definition ----------------------------------------------------------------------------------------------


def _matrices(pages: LoraPages, place: LoraPlace, group: int) -> tuple[Tensor, Tensor] | None:
    """A [rank, parts, in] and B [rank, out] of a group, wide; None where its adapter does not change the layer."""
    slot, expert = divmod(group, place.num_experts)
    rank = int(pages.ranks[place.index, slot])
    if rank == 0:
        return None
    used = pages.table[slot, : ceil_div(rank, PAGE_RANKS)].long()
    # Cut first: a page holds all layers, and what is indexed is copied.
    a = pages.pages[:, place.a_begin : place.a_begin + place.a_size].index_select(0, used)
    b = pages.pages[:, place.b_begin : place.b_begin + place.b_size].index_select(0, used)
    a = a.reshape(-1, place.num_parts, place.num_experts, place.in_features)[:rank, :, expert]
    b = b.reshape(-1, place.num_experts, place.out_features)[:rank, expert]
    return widened(a), widened(b)


def _lora_add_torch(
    out: Tensor,
    x: Tensor,
    groups: LoraGroups,
    pages: LoraPages,
    place: LoraPlace,
    scale: Tensor | None,
    config: LoraConfig | None = None,
) -> Tensor:
    share = groups.num_rows // max(x.shape[0], 1)
    for group, (first, last) in enumerate(pairwise(groups.rows.starts.tolist())):
        if first == last or (found := _matrices(pages, place, group)) is None:
            continue
        a, b = found
        rows = groups.rows.order[first:last]
        inputs = widened(x.index_select(0, rows if share == 1 else rows // share))
        shrunk = (inputs @ a.flatten(0, 1).t()).unflatten(1, a.shape[:2])
        added = _products(shrunk, b, place)
        _add_rows(out, rows, added if scale is None else added * scale[rows.long(), None])
    return out


def _lora_expand_torch(out: Tensor, shrunk: Tensor, groups: LoraGroups, pages: LoraPages, place: LoraPlace) -> Tensor:
    for group, (first, last) in enumerate(pairwise(groups.rows.starts.tolist())):
        if first < last and (found := _matrices(pages, place, group)) is not None:
            rows = groups.rows.order[first:last]
            chosen = shrunk.index_select(0, rows)[:, : found[1].shape[0], None]
            _add_rows(out, rows, _products(chosen.to(found[1].dtype), found[1], place))
    return out


def _products(shrunk: Tensor, b: Tensor, place: LoraPlace) -> Tensor:
    """shrunk [t, rank, parts], b [rank, out] -> [t, out]"""
    if place.num_parts == 1:
        return shrunk[:, :, 0] @ b
    parts = zip(shrunk.unbind(2), b.split(place.out_sizes, dim=1), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts], dim=1)


def _add_rows(out: Tensor, rows: Tensor, added: Tensor) -> None:
    """In the precision of `added`."""
    if out.dtype == added.dtype:
        out.index_add_(0, rows, added)
    else:
        out[rows.long()] = (out[rows.long()].to(added.dtype) + added).to(out.dtype)


# ---- Triton ------------------------------------------------------------------------------------------------------


def _lora_add_triton(
    out: Tensor,
    x: Tensor,
    groups: LoraGroups,
    pages: LoraPages,
    place: LoraPlace,
    scale: Tensor | None,
    config: LoraConfig | None = None,
) -> Tensor:
    num_rows = groups.num_rows
    if num_rows == 0:
        return out
    config = config or lora_config(num_rows, place, pages.max_rank, x.element_size())
    shape = (config.splits, num_rows, place.num_parts, pages.max_rank)
    shrunk = torch.empty(shape, dtype=torch.float32, device=x.device)  # what lies beyond a rank is not read
    grid = (groups.num_programs(config.block_m), place.num_parts, config.splits)
    _shrink_kernel[grid](
        shrunk,
        x,
        pages.pages,
        pages.table,
        pages.ranks[place.index],
        groups.rows.order,
        groups.tiles(config.block_m),
        num_rows,
        place.a_begin,
        x.stride(0),
        SHARE=num_rows // x.shape[0],
        IN_FEATURES=place.in_features,
        NUM_PARTS=place.num_parts,
        SPLIT_SIZE=ceil_div(place.in_features, config.splits * config.block_k) * config.block_k,
        BLOCK_K=config.block_k,
        **_constants(pages, place, config),
        **launch_options(x),
    )
    return _expand(out, shrunk, groups, pages, place, scale, config)


def _lora_expand_triton(out: Tensor, shrunk: Tensor, groups: LoraGroups, pages: LoraPages, place: LoraPlace) -> Tensor:
    config = lora_config(groups.num_rows, place, pages.max_rank, out.element_size())
    return _expand(out, shrunk[None, :, None], groups, pages, place, None, config)


def _expand(
    out: Tensor,
    shrunk: Tensor,
    groups: LoraGroups,
    pages: LoraPages,
    place: LoraPlace,
    scale: Tensor | None,
    config: LoraConfig,
) -> Tensor:
    sizes = [*place.out_sizes, *[0] * (MAX_PARTS - place.num_parts)]
    width = sum(ceil_div(size, config.block_n) for size in sizes)
    _expand_kernel[(groups.num_programs(config.block_m), width)](
        out,
        shrunk,
        pages.pages,
        pages.table,
        pages.ranks[place.index],
        groups.rows.order,
        groups.tiles(config.block_m),
        scale,
        groups.num_rows,
        place.b_begin,
        out.stride(0),
        WIDTH=place.out_features,
        NUM_PARTS=place.num_parts,
        SIZE_0=sizes[0],
        SIZE_1=sizes[1],
        SIZE_2=sizes[2],
        SPLITS=shrunk.shape[0],
        BLOCK_N=config.block_n,
        **_constants(pages, place, config),
        **launch_options(out),
    )
    return out


def _constants(pages: LoraPages, place: LoraPlace, config: LoraConfig) -> dict[str, int]:
    return dict(
        PAGE_SIZE=pages.pages.stride(0),
        MAX_PAGES=pages.table.shape[1],
        RANKS=PAGE_RANKS,
        NUM_EXPERTS=place.num_experts,
        BLOCK_M=config.block_m,
        BLOCK_R=config.block_r,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@jit_for_any("num_rows")
def _shrink_kernel(
    shrunk: Pointer,  # [splits, num_rows, parts, max_rank]
    x: Pointer,
    pages: Pointer,
    table: Pointer,
    ranks: Pointer,
    order: Pointer,
    tiles: Pointer,
    num_rows: Scalar,
    a_begin: Scalar,
    x_stride: Scalar,
    SHARE: constexpr,
    IN_FEATURES: constexpr,
    NUM_PARTS: constexpr,
    SPLIT_SIZE: constexpr,
    BLOCK_K: constexpr,
    PAGE_SIZE: constexpr,
    MAX_PAGES: constexpr,
    RANKS: constexpr,
    NUM_EXPERTS: constexpr,
    BLOCK_M: constexpr,
    BLOCK_R: constexpr,
    OVERLAP: constexpr,
) -> None:
    """A program multiplies tiles of rows of one group with a piece of one part's A."""
    wait_for_previous(OVERLAP)
    part, split = tl.program_id(1), tl.program_id(2)
    for tile in range(tl.program_id(0), tl.load(tiles), tl.num_programs(0)):
        group, first, last = read_tile(tiles, tile)
        slot, expert = group // NUM_EXPERTS, group % NUM_EXPERTS
        rank = tl.load(ranks + slot)
        place = first + tl.arange(0, BLOCK_M)
        row = tl.load(order + tl.minimum(place, last - 1)).to(tl.int64)
        inputs = x + row // SHARE * x_stride
        target = shrunk + ((split.to(tl.int64) * num_rows + row) * NUM_PARTS + part) * (MAX_PAGES * RANKS)
        for begin in range(0, rank, BLOCK_R):
            r = begin + tl.arange(0, BLOCK_R)
            is_rank = r < rank
            page = tl.load(table + slot * MAX_PAGES + r // RANKS, mask=is_rank, other=0).to(tl.int64)
            line = ((r % RANKS) * NUM_PARTS + part) * NUM_EXPERTS + expert
            matrix = pages + page * PAGE_SIZE + a_begin + line.to(tl.int64) * IN_FEATURES
            product = tl.zeros((BLOCK_R, BLOCK_M), dtype=tl.float32)
            for start in range(0, SPLIT_SIZE, BLOCK_K):
                column = split * SPLIT_SIZE + start + tl.arange(0, BLOCK_K)
                inside = column < IN_FEATURES
                weights = tl.load(matrix[:, None] + column[None, :], mask=is_rank[:, None] & inside[None, :], other=0.0)
                values = tl.load(inputs[None, :] + column[:, None], mask=inside[:, None], other=0.0)
                product = tl.dot(weights, values, product, input_precision="ieee")
            tl.store(target[None, :] + r[:, None], product, mask=is_rank[:, None] & (place < last)[None, :])


@jit_for_any("num_rows")
def _expand_kernel(
    out: Pointer,
    shrunk: Pointer,
    pages: Pointer,
    table: Pointer,
    ranks: Pointer,
    order: Pointer,
    tiles: Pointer,
    scale: Pointer,
    num_rows: Scalar,
    b_begin: Scalar,
    out_stride: Scalar,
    WIDTH: constexpr,
    NUM_PARTS: constexpr,
    SIZE_0: constexpr,
    SIZE_1: constexpr,
    SIZE_2: constexpr,
    SPLITS: constexpr,
    BLOCK_N: constexpr,
    PAGE_SIZE: constexpr,
    MAX_PAGES: constexpr,
    RANKS: constexpr,
    NUM_EXPERTS: constexpr,
    BLOCK_M: constexpr,
    BLOCK_R: constexpr,
    OVERLAP: constexpr,
) -> None:
    """A program adds to some outputs of one part, of tiles of rows of one group."""
    wait_for_previous(OVERLAP)
    part, begin, end = _find_columns(tl.program_id(1), SIZE_0, SIZE_1, SIZE_2, BLOCK_N)
    column = begin + tl.arange(0, BLOCK_N)
    for tile in range(tl.program_id(0), tl.load(tiles), tl.num_programs(0)):
        group, first, last = read_tile(tiles, tile)
        slot, expert = group // NUM_EXPERTS, group % NUM_EXPERTS
        rank = tl.load(ranks + slot)
        place = first + tl.arange(0, BLOCK_M)
        row = tl.load(order + tl.minimum(place, last - 1)).to(tl.int64)
        product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first_rank in range(0, rank, BLOCK_R):
            r = first_rank + tl.arange(0, BLOCK_R)
            is_rank = r < rank
            values = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            for split in range(SPLITS):
                source = shrunk + ((split * num_rows + row) * NUM_PARTS + part) * (MAX_PAGES * RANKS)
                values += tl.load(source[:, None] + r[None, :], mask=is_rank[None, :], other=0.0)
            page = tl.load(table + slot * MAX_PAGES + r // RANKS, mask=is_rank, other=0).to(tl.int64)
            line = (r % RANKS) * NUM_EXPERTS + expert
            matrix = pages + page * PAGE_SIZE + b_begin + line.to(tl.int64) * WIDTH
            there = is_rank[:, None] & (column < end)[None, :]
            weights = tl.load(matrix[:, None] + column[None, :], mask=there, other=0.0)
            product = tl.dot(values.to(weights.dtype), weights, product, input_precision="ieee")
        if rank > 0:
            if scale is not None:
                product *= tl.load(scale + row).to(tl.float32)[:, None]
            pointers = out + row[:, None] * out_stride + column[None, :]
            there = (place < last)[:, None] & (column < end)[None, :]
            product += tl.load(pointers, mask=there, other=0.0).to(tl.float32)
            tl.store(pointers, product.to(out.dtype.element_ty), mask=there)


@jit
def _find_columns(block: Scalar, SIZE_0: constexpr, SIZE_1: constexpr, SIZE_2: constexpr, BLOCK_N: constexpr) -> Scalar:
    """The part that a block of columns is in, the block's first column, and where the part ends."""
    first = tl.cdiv(SIZE_0, BLOCK_N)
    second = first + tl.cdiv(SIZE_1, BLOCK_N)
    part = (block >= first).to(tl.int32) + (block >= second).to(tl.int32)
    before = tl.where(part == 0, 0, tl.where(part == 1, first, second))
    start = tl.where(part == 0, 0, tl.where(part == 1, SIZE_0, SIZE_0 + SIZE_1))
    end = tl.where(part == 0, SIZE_0, tl.where(part == 1, SIZE_0 + SIZE_1, SIZE_0 + SIZE_1 + SIZE_2))
    return part, start + (block - before) * BLOCK_N, end
