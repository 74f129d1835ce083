"""From rows to a `Step`: the tensors that a forward reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from legato.kernels.attention.paged import PagedContext
from legato.layers.step import ChunkSpans, Sides, Step
from legato.pb import generate_pb2 as pb
from legato.server.rows import Rows, RowStep, to_device


def advance(rows: Rows, request: pb.StepRequest) -> list[RowStep]:
    """Write down what a request says about the rows; returns what each of them computes."""
    for admission in request.admitted:
        rows.admit(
            admission.row,
            admission.request_id,
            np.frombuffer(admission.input_ids, dtype="<i4"),
            admission.num_cached,
            admission.prompt_logprobs,
            admission.top_n_tokens,
            admission.num_generated,
        )
        rows.append_blocks(admission.row, list(admission.blocks))
        if rows.adapters is not None:
            rows.adapters.set(admission.row, admission.adapter_slot if admission.adapter_id else None)
    parts, first, first_draft = [], 0, 0
    new_blocks, all_drafts = list(request.new_blocks), list(request.draft_ids)
    num_drafts = request.num_drafts or [0] * len(request.rows)
    columns = zip(request.rows, request.num_tokens, request.num_new_blocks, num_drafts, strict=True)
    for row, count, num_new, drafts in columns:
        if num_new:
            rows.append_blocks(row, new_blocks[first : first + num_new])
            first += num_new
        draft_ids = tuple(all_drafts[first_draft : first_draft + drafts])
        first_draft += drafts
        parts.append(rows.advance(row, count, draft_ids))
    return parts


def decodes_first(parts: list[RowStep]) -> list[int]:
    """RowAndBlockAllocator of the decodes, then of the chunks: attention treats the two differently.

    The longest decodes come first: what is begun last should be short, or the device waits for it with nothing to do.
    """
    return sorted(range(len(parts)), key=lambda i: -parts[i].start if parts[i].decode else 1)


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


class Packed:
    """The parts of a step end to end, in numbers of the host. They are ordered, decodes first."""

    def __init__(self, rows: Rows, parts: list[RowStep]) -> None:
        self.rows = np.array([part.row for part in parts], dtype=np.int32)
        self.counts = np.array([part.count for part in parts], dtype=np.int32)
        self.starts = np.array([part.start for part in parts], dtype=np.int32)
        self.ends = np.cumsum(self.counts)
        self.context_lens = self.starts + self.counts
        self.num_decodes = sum(part.decode for part in parts)
        # At how many of its last tokens each samples.
        num_sampled = np.array([part.num_sampled for part in parts])
        self.sampled_rows = np.repeat(self.rows, num_sampled)
        self.sampled_tokens = _last(self.ends, num_sampled)
        # Of every token: where it is in its sequence, and in which row that is.
        self.positions = np.arange(self.ends[-1]) - np.repeat(self.ends - self.context_lens, self.counts)
        self.owners = np.repeat(self.rows, self.counts)
        self.has_drafts = any(part.draft_ids for part in parts)
        # Negative: the last token of the row, on the device.
        self.chunk_ids = _chunk_ids(rows, parts[self.num_decodes :])


def _chunk_ids(rows: Rows, parts: list[RowStep]) -> np.ndarray:
    chunks: list[np.ndarray | list[int]] = []
    drafted: list[int] = []  # of parts with drafts, one behind the other: an array for each would take microseconds
    for part in parts:
        input_ids = rows[part.row].input_ids
        if part.draft_ids:
            drafted.append(int(input_ids[part.start]) if part.start < len(input_ids) else -1)
            drafted.extend(part.draft_ids)
        else:
            if drafted:
                chunks.append(drafted)
                drafted = []
            chunks.append(input_ids[part.start : part.start + part.count])
    if drafted:
        chunks.append(drafted)
    return np.concatenate([np.asarray(chunk, dtype=np.int64) for chunk in chunks] or [np.zeros(0, dtype=np.int64)])


def _last(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Of each run of tokens, which ends before `ends`, the last `counts`."""
    cu_counts: np.ndarray = np.cumsum(counts)
    shifts: np.ndarray = np.repeat(ends - cu_counts, counts)
    return shifts + np.arange(cu_counts[-1])


def prepare(rows: Rows, parts: list[RowStep], block_size: int, dtype: torch.dtype) -> Step:
    """`parts` are ordered, decodes first. Chunk tokens come from the host, decode tokens are on the device."""
    device, packed = rows.last_tokens.device, Packed(rows, parts)
    d = packed.num_decodes
    row_index, positions = to_device(packed.rows, device), to_device(packed.positions, device)
    input_ids = rows.last_tokens[row_index[:d]]
    if d < len(parts):
        input_ids = torch.cat((input_ids, to_device(packed.chunk_ids, device)))
    if packed.has_drafts:
        input_ids = torch.where(input_ids < 0, rows.last_tokens[to_device(packed.owners, device)], input_ids)
    on_host = None
    if device.type == "cpu":
        # numpy, which is at home in small arrays: a call of torch takes microseconds.
        tables = rows.block_tables.numpy()
        blocks = tables[packed.owners, packed.positions // block_size].astype(np.int64)
        slots = torch.from_numpy(blocks * block_size + packed.positions % block_size)
        query_lens, context_lens = packed.counts.tolist(), packed.context_lens.tolist()
        on_host = PagedContext(query_lens, context_lens, d, torch.from_numpy(tables[packed.rows]), block_size, dtype)
    else:
        chosen = rows.block_tables[to_device(packed.owners, device), positions // block_size].long()
        slots = chosen * block_size + positions % block_size
    return Step(
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        # Kernels need at least one row: of a step without samples, one token is kept all the same.
        logits_indices=to_device(packed.sampled_tokens if len(packed.sampled_tokens) else packed.ends[:1] - 1, device),
        num_decodes=d,
        rows=row_index,
        block_tables=rows.block_tables,
        context_lens=to_device(packed.context_lens, device),
        chunks=_spans(packed.counts[d:], packed.starts[d:], d, device),
        on_host=on_host,
        sides=None if rows.encoder_lens is None else _sides(rows, rows.encoder_lens, parts, packed),
        adapters=rows.adapters_of(parts, packed.owners),
    )


def _sides(rows: Rows, encoder_lens: torch.Tensor, parts: list[RowStep], packed: Packed) -> Sides:
    device = encoder_lens.device
    lens = np.array([rows[part.row].encoder_len for part in parts])
    is_decoder = packed.positions >= np.repeat(lens, packed.counts)
    rows_there = to_device(packed.owners[is_decoder], device)
    return Sides(
        prompt_lens=[part.num_whole - 1 for part in parts if part.num_whole > 1],
        encoder=None if is_decoder.all() else to_device(np.flatnonzero(~is_decoder), device),
        decoder=None if is_decoder.all() else to_device(np.flatnonzero(is_decoder), device),
        rows=rows_there,
        encoder_lens=encoder_lens[rows_there],
    )


def _spans(counts: np.ndarray, starts: np.ndarray, first_token: int, device: torch.device) -> ChunkSpans | None:
    if not len(counts):
        return None
    cu_seqlens = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    return ChunkSpans(first_token, to_device(cu_seqlens, device), None if starts.any() else counts.tolist())
