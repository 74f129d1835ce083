"""Rows to one `Step`: the tensors that a forward reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from legato.kernels.paged_attention import PagedContext
from legato.layers.step import ChunkSpans, Sides, Step
from legato.server.rows import Rows, RowStep, to_device


def decodes_first(parts: list[RowStep]) -> list[int]:
    """Places of the decodes, then of the chunks: attention treats the two differently."""
    return sorted(range(len(parts)), key=lambda i: not parts[i].decode)


def halves(parts: list[RowStep]) -> tuple[list[RowStep], list[RowStep]]:
    """The same step as two, of half the tokens each, to be computed one after the other. One chunk may be in both.

    The second is empty where the first part is all there is and cannot be cut, the first where there is one token.
    """
    left = sum(part.count for part in parts) // 2
    first: list[RowStep] = []
    rest: list[RowStep] = []
    for part in parts:
        count = min(part.count, left)
        if count < part.num_whole:  # then it is with the rest, or alone before them: rows stay in their order
            count = left = 0 if first else part.count
        left -= count
        if count:
            whole = count == part.count
            first.append(part if whole else replace(part, count=count, samples=False))
        if count < part.count:
            num_whole = 0 if count else part.num_whole
            rest.append(replace(part, start=part.start + count, count=part.count - count, num_whole=num_whole))
    return first, rest


def prepare(rows: Rows, parts: list[RowStep], block_size: int, dtype: torch.dtype) -> Step:
    """`parts` are ordered, decodes first. Chunk tokens come from the host, decode tokens are on the device."""
    device = rows.last_tokens.device
    counts = np.array([part.count for part in parts], dtype=np.int32)
    starts = np.array([part.start for part in parts], dtype=np.int32)
    index = np.array([part.row for part in parts], dtype=np.int32)
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
    num_decodes = sum(part.decode for part in parts)

    row_index, positions_there = to_device(index, device), to_device(positions, device)
    owners = to_device(np.repeat(index, counts), device)
    blocks = rows.block_tables[owners, positions_there // block_size].long()
    input_ids = rows.last_tokens[row_index[:num_decodes]]
    if chunks := parts[num_decodes:]:
        ids = [rows[part.row].input_ids[part.start : part.start + part.count] for part in chunks]
        input_ids = torch.cat((input_ids, to_device(np.concatenate(ids), device)))
    sampling = np.array([part.samples for part in parts])
    context_lens = starts + counts
    return Step(
        input_ids=input_ids,
        positions=positions_there,
        slots=blocks * block_size + positions_there % block_size,
        logits_indices=to_device(ends[sampling] - 1, device),
        num_decodes=num_decodes,
        rows=row_index,
        block_tables=rows.block_tables,
        context_lens=to_device(context_lens, device),
        chunks=_spans(counts[num_decodes:], starts[num_decodes:], device),
        on_host=PagedContext(
            counts.tolist(), context_lens.tolist(), num_decodes, rows.block_tables[row_index], block_size, dtype
        )
        if device.type == "cpu"
        else None,
        sides=None if rows.encoder_lens is None else _sides(rows, rows.encoder_lens, parts, positions),
    )


def _sides(rows: Rows, encoder_lens: torch.Tensor, parts: list[RowStep], positions: np.ndarray) -> Sides:
    device = encoder_lens.device
    counts = np.array([part.count for part in parts])
    lens = np.array([rows[part.row].encoder_len for part in parts])
    is_decoder = positions >= np.repeat(lens, counts)
    owners = np.repeat(np.array([part.row for part in parts], dtype=np.int32), counts)
    rows_there = to_device(owners[is_decoder], device)
    return Sides(
        prompt_lens=[part.num_whole - 1 for part in parts if part.num_whole > 1],
        encoder=None if is_decoder.all() else to_device(np.flatnonzero(~is_decoder), device),
        decoder=None if is_decoder.all() else to_device(np.flatnonzero(is_decoder), device),
        rows=rows_there,
        encoder_lens=encoder_lens[rows_there],
    )


def _spans(counts: np.ndarray, starts: np.ndarray, device: torch.device) -> ChunkSpans | None:
    if not len(counts):
        return None
    cu_seqlens = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    return ChunkSpans(to_device(cu_seqlens, device), None if starts.any() else counts.tolist())
