"""The most likely token of each row and its log probability, in one pass over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.arrival import NUM_COUNTERS, arrival_counters, arrives_last
from legato.kernels.language import Pointer, Scalar, constexpr, jit, kernel_or_torch, tl, widened
from legato.kernels.overlap import launch_options, wait_for_previous

# Tokens per iteration of a program, and programs to aim at over all rows: a few for every multiprocessor.
BLOCK = 2048
NUM_PROGRAMS = 1024
NUMBERS_OF_SPLITS = (32, 8, 2)


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, vocabulary] → the first largest of each row [n] int64, and its log-softmax [n] float32."""
    assert logits.dim() == 2 and logits.stride(1) == 1, logits.stride()
    return kernel_or_torch(logits, _greedy_triton, _greedy_torch)(logits)


def _greedy_torch(logits: Tensor) -> tuple[Tensor, Tensor]:
    wide = widened(logits)
    token_ids = wide.argmax(dim=-1)
    return token_ids, wide.log_softmax(dim=-1).gather(1, token_ids[:, None])[:, 0]


def _greedy_triton(logits: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return token_ids, logprobs
    assert num_rows <= NUM_COUNTERS, num_rows
    num_splits = _num_splits(num_rows, vocab_size)
    _greedy_kernel[(num_rows, num_splits)](
        token_ids,
        logprobs,
        logits,
        torch.empty(num_rows, num_splits, 4, dtype=torch.float32, device=logits.device),
        arrival_counters(logits.device),
        vocab_size,
        logits.stride(0),
        NUM_SPLITS=num_splits,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(logits),
    )
    return token_ids, logprobs


def _num_splits(num_rows: int, vocab_size: int) -> int:
    """A power of two: as many as the vocabulary has blocks, fewer when the rows alone fill the chip. There are few of
    them, because a kernel is compiled for each."""
    wanted = next((splits for splits in NUMBERS_OF_SPLITS if splits * num_rows <= NUM_PROGRAMS), NUMBERS_OF_SPLITS[-1])
    return min(wanted, 1 << (-(-vocab_size // BLOCK)).bit_length() - 1)


@jit
def _greedy_kernel(
    token_ids: Pointer,
    logprobs: Pointer,
    logits: Pointer,
    parts: Pointer,
    counters: Pointer,
    vocab_size: Scalar,
    logits_stride: Scalar,
    NUM_SPLITS: constexpr,
    BLOCK: constexpr,
    OVERLAP: constexpr,
) -> None:
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    split = tl.program_id(1)
    row_logits = logits + row.to(tl.int64) * logits_stride
    split_len = tl.cdiv(tl.cdiv(vocab_size, NUM_SPLITS), BLOCK) * BLOCK
    begin = split * split_len
    end = tl.minimum(begin + split_len, vocab_size)
    maximum, total, best, token = _scan(row_logits, begin, end, BLOCK)
    # Token ids are below 2^24, which float32 holds exactly: one buffer for all four numbers.
    part = parts + (row * NUM_SPLITS + split) * 4
    tl.store(part, maximum)
    tl.store(part + 1, total)
    tl.store(part + 2, best)
    tl.store(part + 3, token.to(tl.float32))
    if arrives_last(counters + row, NUM_SPLITS):
        every = parts + (row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)) * 4
        maxima = tl.load(every, cache_modifier=".cg")
        maximum = tl.max(maxima, axis=0)
        total = tl.sum(tl.load(every + 1, cache_modifier=".cg") * tl.exp(maxima - maximum), axis=0)
        bests = tl.load(every + 2, cache_modifier=".cg")
        tokens = tl.load(every + 3, cache_modifier=".cg").to(tl.int32)
        token = tl.min(tl.where(bests == tl.max(bests, axis=0), tokens, vocab_size - 1), axis=0)
        logit = tl.load(row_logits + token).to(tl.float32)
        tl.store(token_ids + row, token)
        tl.store(logprobs + row, logit - maximum - tl.log(total))


@jit
def _scan(logits: Pointer, begin: Scalar, end: Scalar, BLOCK: constexpr) -> Scalar:
    """Over tokens [begin, end): largest finite logit, sum of exp(logit - it), largest logit, its first token."""
    # Finite where nothing was seen, so that differences are never NaN.
    maximum = -1.0e30
    total = 0.0
    best = float("-inf")
    best_token = begin
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        values = tl.load(logits + token, mask=token < end, other=float("-inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(values))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(values - new_maximum))
        maximum = new_maximum
        block_best = tl.max(values)
        block_token = tl.min(tl.where(values == block_best, token, end - 1))
        best_token = tl.where(block_best > best, block_token, best_token)
        best = tl.maximum(best, block_best)
    return maximum, total, best, best_token
