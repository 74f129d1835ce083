"""Splits contexts of different lengths among the programs of decode attention, on the device.

All contexts are cut into splits of one length. The first split of every sequence has a program of its own, which knows
it at once; those behind are numbered in the order of their sequences, and a program of these finds out whose it is.
"""

from __future__ import annotations

from legato.kernels.language import Pointer, Scalar, constexpr, jit, tl


@jit
def visible(context_len: Scalar, WINDOW: constexpr) -> Scalar:
    if WINDOW > 0:
        context_len = tl.minimum(context_len, WINDOW)
    return context_len


@jit
def shortest_split_len(total: Scalar, extra_splits: Scalar, min_split_len: Scalar, BLOCK_N: constexpr) -> Scalar:
    return tl.maximum(tl.cdiv(tl.cdiv(total, extra_splits), BLOCK_N) * BLOCK_N, min_split_len)


@jit
def choose_split_len(
    context_lens: Pointer,
    num_sequences: Scalar,
    extra_splits: Scalar,
    min_split_len: Scalar,
    BLOCK_N: constexpr,
    WINDOW: constexpr,
    SCAN: constexpr,
) -> Scalar:
    """The shortest for which there are programs enough, given that the first split of each sequence has its own."""
    total = 0
    for first in range(0, num_sequences, SCAN):
        i = first + tl.arange(0, SCAN)
        total += tl.sum(visible(tl.load(context_lens + i, mask=i < num_sequences, other=0), WINDOW), axis=0)
    return shortest_split_len(total, extra_splits, min_split_len, BLOCK_N)


@jit
def _further_splits(
    i: Scalar, context_lens: Pointer, num_sequences: Scalar, split_len: Scalar, WINDOW: constexpr
) -> Scalar:
    """How many splits these sequences have behind their first."""
    lengths = visible(tl.load(context_lens + i, mask=i < num_sequences, other=0), WINDOW)
    return tl.maximum(tl.cdiv(lengths, split_len) - 1, 0)


@jit
def find_sequence(
    place: Scalar,
    context_lens: Pointer,
    num_sequences: Scalar,
    split_len: Scalar,
    WINDOW: constexpr,
    SCAN: constexpr,
) -> Scalar:
    """Whose split has this place among all further splits, and the place of that sequence's second split."""
    sequence = 0
    first_place = 0
    before = 0
    for first in range(0, num_sequences, SCAN):
        i = first + tl.arange(0, SCAN)
        num_splits = _further_splits(i, context_lens, num_sequences, split_len, WINDOW)
        ends = before + tl.cumsum(num_splits, axis=0)
        passed = (ends <= place) & (i < num_sequences)
        sequence += tl.sum(passed.to(tl.int32), axis=0)
        first_place = tl.maximum(first_place, tl.max(tl.where(passed, ends, 0), axis=0))
        before += tl.sum(num_splits, axis=0)
    return sequence, first_place


@jit
def splits_before(
    sequence: Scalar,
    context_lens: Pointer,
    num_sequences: Scalar,
    split_len: Scalar,
    WINDOW: constexpr,
    SCAN: constexpr,
) -> Scalar:
    """Further splits of all sequences before this one."""
    before = 0
    for first in range(0, sequence, SCAN):
        i = first + tl.arange(0, SCAN)
        num_splits = _further_splits(i, context_lens, num_sequences, split_len, WINDOW)
        before += tl.sum(tl.where(i < sequence, num_splits, 0), axis=0)
    return before
