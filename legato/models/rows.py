"""Which rows of a checkpoint's attention projections belong to the heads of a shard, and in which order."""

from __future__ import annotations

from typing import Literal

import torch

from legato.layers.shard import Heads
from legato.quantization.stored import Ranges

# How a fused checkpoint has its heads:
#   concatenated   all of q, all of k, all of v
#   grouped        for each key head the queries that read it, then its key and its value; where every query has a key
#                  head of its own (BLOOM, GPT-NeoX) that is q, k, v of the first head, of the second, …
#   quarters       four times q, v and k of a quarter of the heads (CodeGen)
QkvLayout = Literal["concatenated", "grouped", "quarters"]


def qkv_rows(heads: Heads, layout: QkvLayout | Literal["separate"]) -> list[list[tuple[int, int]]]:
    """Where the heads of this shard are: row ranges of q, of k and of v, one for each head."""
    size, v_size = heads.head_dim, heads.v_head_dim
    group = heads.all_heads // heads.all_kv_heads
    queries, keys = range(heads.first, heads.last), range(heads.first_kv, heads.last_kv)
    if layout == "grouped":
        whole = (group + 1) * size + v_size
        q = [head // group * whole + head % group * size for head in queries]
        k = [head * whole + group * size for head in keys]
        v = [head * whole + (group + 1) * size for head in keys]
    elif layout == "quarters":
        quarter = heads.all_heads // 4
        q, v, k = (
            [(3 * (head // quarter) + part) * quarter * size + head % quarter * size for head in queries]
            for part in range(3)
        )
    else:
        k_begin = heads.all_heads * size if layout == "concatenated" else 0
        v_begin = k_begin + heads.all_kv_heads * size if layout == "concatenated" else 0
        q = [head * size for head in queries]
        k = [k_begin + head * size for head in keys]
        v = [v_begin + head * v_size for head in keys]
    return [[(row, row + width) for row in rows] for rows, width in ((q, size), (k, size), (v, v_size))]


def without_neighbours(heads: Heads, dim: int) -> torch.Tensor:
    """Order of the rows of a packed projection: in each head of q and k the even ones of the first `dim`, the odd ones
    of them, the rest."""
    head = torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2), torch.arange(dim, heads.head_dim)))
    num_turned = heads.num_heads + heads.num_kv_heads
    turned = (torch.arange(num_turned)[:, None] * heads.head_dim + head).flatten()
    end = num_turned * heads.head_dim
    return torch.cat((turned, torch.arange(end, end + heads.num_kv_heads * heads.v_head_dim)))


def merged_ranges(ranges: Ranges) -> Ranges:
    """Neighbours as one: fewer reads."""
    merged: list[tuple[int, int]] = []
    for first, last in ranges:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged
