"""Random sequences whose blocks are scattered over a cache in which everything else is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.kernels.paged_kv import PagedKV

NAN = float("nan")


@dataclass(frozen=True)
class PagedCase:
    q: Tensor  # [T, heads, head_dim]
    kv: PagedKV
    cu_seqlens_q: Tensor  # [n + 1] int32


def paged_case(
    device: torch.device,
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    with_rows: bool = False,
) -> PagedCase:
    generator = torch.Generator().manual_seed(len(query_lens) * 1000 + sum(context_lens))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_blocks = [-(-length // block_size) for length in context_lens]
    free = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    # Rows stand in another order than the sequences, in a table wider than needed; unused entries are out of range.
    rows = torch.randperm(len(context_lens) + 2, generator=generator)[: len(context_lens)].to(torch.int32)
    tables = torch.full((len(context_lens) + 2, max(num_blocks, default=0) + 4), 2**30, dtype=torch.int32)
    k_cache, v_cache = (
        torch.full((sum(num_blocks) + 3, block_size, kv_heads, head_dim), NAN, dtype=cache_dtype or dtype)
        for _ in range(2)
    )
    for row, count, length in zip(rows.tolist(), num_blocks, context_lens, strict=True):
        blocks = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        tables[row, :count] = blocks
        positions = torch.arange(length)
        slots = (blocks[positions // block_size] * block_size + positions % block_size).long()
        for cache in (k_cache, v_cache):
            cache.flatten(0, 1)[slots] = randn(length, kv_heads, head_dim).to(cache.dtype)
    if not with_rows:
        tables = tables[rows.long()]
    lengths = torch.tensor(context_lens, dtype=torch.int32)
    kv = PagedKV(
        k_cache.to(device),
        v_cache.to(device),
        tables.to(device),
        lengths.to(device),
        rows.to(device) if with_rows else None,
    )
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32).to(device)
    # As in the packed projection, a query's row is followed by things that are not queries.
    q = randn(sum(query_lens), heads + 2, head_dim)[:, :heads].to(device)
    return PagedCase(q, kv, starts)
