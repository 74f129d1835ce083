"""What a decode step reads from the persistent rows and writes back to them, in one launch each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.language import Pointer, Scalar, ceil_div, constexpr, jit_for_any, kernel_or_torch, tl
from legato.kernels.overlap import launch_options, wait_for_previous

# Rows per program: a step of one row is as soon done as one of 128.
BLOCK = 128


@dataclass(frozen=True, slots=True)
class RowTables:
    """One line per row; `padding` is the number of a row that stays empty however often it takes part."""

    block_tables: Tensor  # [num_rows, max_blocks] int32
    lengths: Tensor  # [num_rows] int32, tokens whose keys and values are in the cache
    last_tokens: Tensor  # [num_rows] int64
    block_size: int
    padding: int


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The next token of some rows, all [n]."""

    input_ids: Tensor  # int64
    positions: Tensor  # int32
    slots: Tensor  # int64
    context_lens: Tensor  # int32, the token itself included


def gather_rows(rows: Tensor, tables: RowTables) -> DecodeInputs:
    """rows [n] int32."""
    return kernel_or_torch(rows, _gather_rows_triton, _gather_rows_torch)(rows, tables)


def advance_rows(rows: Tensor, token_ids: Tensor, tables: RowTables) -> None:
    """Every row has one token more in the cache, and `token_ids` [n] int64 to compute next."""
    kernel_or_torch(rows, _advance_rows_triton, _advance_rows_torch)(rows, token_ids, tables)


def _gather_rows_torch(rows: Tensor, tables: RowTables) -> DecodeInputs:
    positions = tables.lengths[rows]
    blocks = tables.block_tables[rows, positions // tables.block_size].long()
    slots = blocks * tables.block_size + positions % tables.block_size
    return DecodeInputs(tables.last_tokens[rows], positions, slots, positions + 1)


def _advance_rows_torch(rows: Tensor, token_ids: Tensor, tables: RowTables) -> None:
    tables.last_tokens[rows] = token_ids
    tables.lengths[rows] = torch.where(rows == tables.padding, 0, tables.lengths[rows] + 1)


def _gather_rows_triton(rows: Tensor, tables: RowTables) -> DecodeInputs:
    count = rows.shape[0]
    wide = torch.empty(2, count, dtype=torch.int64, device=rows.device)
    narrow = torch.empty(2, count, dtype=torch.int32, device=rows.device)
    gathered = DecodeInputs(wide[0], narrow[0], wide[1], narrow[1])
    _gather_rows_kernel[(ceil_div(count, BLOCK),)](
        gathered.input_ids,
        gathered.positions,
        gathered.slots,
        gathered.context_lens,
        rows,
        tables.block_tables,
        tables.lengths,
        tables.last_tokens,
        count,
        tables.block_tables.stride(0),
        BLOCK_SIZE=tables.block_size,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(rows),
    )
    return gathered


def _advance_rows_triton(rows: Tensor, token_ids: Tensor, tables: RowTables) -> None:
    count = rows.shape[0]
    _advance_rows_kernel[(ceil_div(count, BLOCK),)](
        rows,
        token_ids,
        tables.lengths,
        tables.last_tokens,
        count,
        PADDING=tables.padding,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(rows),
    )


# What is written lies behind as many numbers as there are rows: aligned or not.
@jit_for_any("slots", "context_lens", "rows", "count")
def _gather_rows_kernel(
    input_ids: Pointer,
    positions: Pointer,
    slots: Pointer,
    context_lens: Pointer,
    rows: Pointer,
    block_tables: Pointer,
    lengths: Pointer,
    last_tokens: Pointer,
    count: Scalar,
    table_stride: Scalar,
    BLOCK_SIZE: constexpr,
    BLOCK: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    length = tl.load(lengths + row, mask=inside, other=0)
    block = tl.load(block_tables + row * table_stride + length // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    tl.store(input_ids + place, tl.load(last_tokens + row, mask=inside, other=0), mask=inside)
    tl.store(positions + place, length, mask=inside)
    tl.store(slots + place, block * BLOCK_SIZE + length % BLOCK_SIZE, mask=inside)
    tl.store(context_lens + place, length + 1, mask=inside)


@jit_for_any("rows", "count")
def _advance_rows_kernel(
    rows: Pointer,
    token_ids: Pointer,
    lengths: Pointer,
    last_tokens: Pointer,
    count: Scalar,
    PADDING: constexpr,
    BLOCK: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    length = tl.load(lengths + row, mask=inside, other=0)
    tl.store(last_tokens + row, tl.load(token_ids + place, mask=inside, other=0), mask=inside)
    tl.store(lengths + row, tl.where(row == PADDING, 0, length + 1), mask=inside)
