"""The next token of each row and its log probability, in one pass over the logits.

Sampling is an argmax too: of logits / temperature plus Gumbel noise. The noise is a pure function of the row's seed,
the position and the token id (Philox 4x32-10), so a row draws the same token whatever stands beside it, however the
vocabulary is split over programs, and when it is computed again after a preemption.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.arrival import NUM_COUNTERS, arrival_counters, arrives_last
from legato.kernels.language import Pointer, Scalar, constexpr, jit, runs_triton, tl, widened
from legato.kernels.overlap import launch_options, wait_for_previous

# Tokens per iteration of a program, and programs to aim at over all rows: a few for every multiprocessor.
BLOCK = 2048
NUM_PROGRAMS = 1024


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, vocabulary] → the first largest of each row [n] int64, and its log-softmax [n] float32."""
    assert logits.dim() == 2 and logits.stride(1) == 1, logits.stride()
    return _sample_triton(logits) if runs_triton(logits) else _sample_torch(logits)


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Like `greedy_sample` for rows of temperature 0; the others draw from softmax(logits / temperature).

    temperature [n] float32, seeds [n] int64, positions [n] int32 or int64. The log probabilities are those of the
    logits as given, whatever the temperature.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1, logits.stride()
    assert temperature.shape == seeds.shape == positions.shape == logits.shape[:1], (temperature.shape, logits.shape)
    assert temperature.is_contiguous() and seeds.is_contiguous() and positions.is_contiguous()
    run = _sample_triton if runs_triton(logits) else _sample_torch
    return run(logits, temperature, seeds, positions)


def _sample_torch(
    logits: Tensor, temperature: Tensor | None = None, seeds: Tensor | None = None, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores = wide = widened(logits)
    if temperature is not None:
        assert seeds is not None and positions is not None
        heat = temperature[:, None]
        noisy = wide / heat.where(heat > 0, 1.0) + gumbel_noise(seeds, positions, logits.shape[1])
        scores = torch.where(heat > 0, noisy, wide)
    token_ids = scores.argmax(dim=-1)
    return token_ids, wide.log_softmax(dim=-1).gather(1, token_ids[:, None])[:, 0]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """[n, vocab_size] float32: the noise that the kernel adds, for samplers that need the scores themselves."""
    groups = torch.arange(-(-vocab_size // 4), device=seeds.device).expand(seeds.shape[0], -1)
    zeros = torch.zeros_like(groups)
    words = _philox_torch(seeds.long()[:, None], [groups, zeros + positions.long()[:, None], zeros, zeros])
    uniform = (torch.stack(words, dim=-1).flatten(1)[:, :vocab_size].float() + 0.5) * 2.0**-32
    # An exponential variate is -log(1 - u): near 0, where the winners are, u itself is exact and 1 - u is not.
    exponential = torch.where(uniform < 1e-3, uniform * (1.0 + 0.5 * uniform), -torch.log(1.0 - uniform))
    return -torch.log(exponential)


def _philox_torch(seed: Tensor, counter: list[Tensor]) -> list[Tensor]:
    """Ten rounds on 32-bit words kept in 64-bit integers."""
    low_bits = 0xFFFFFFFF
    keys = [seed & low_bits, (seed >> 32) & low_bits]
    c0, c1, c2, c3 = (word & low_bits for word in counter)
    for _ in range(10):
        high_a, low_a = _multiply_wide(0xD2511F53, c0)
        high_b, low_b = _multiply_wide(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ keys[0], low_b, high_a ^ c3 ^ keys[1], low_a
        keys = [(keys[0] + 0x9E3779B9) & low_bits, (keys[1] + 0xBB67AE85) & low_bits]
    return [c0, c1, c2, c3]


def _multiply_wide(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 by 32 bit product, by halves of `b`, whose products fit 48 bits."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def _sample_triton(
    logits: Tensor, temperature: Tensor | None = None, seeds: Tensor | None = None, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return token_ids, logprobs
    assert num_rows <= NUM_COUNTERS, num_rows
    num_splits = _num_splits(num_rows, vocab_size)
    _sample_kernel[(num_rows, num_splits)](
        token_ids,
        logprobs,
        logits,
        temperature,
        seeds,
        positions,
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
    """A power of two: as many as the vocabulary has blocks, fewer when the rows alone fill the chip."""
    most = min(-(-vocab_size // BLOCK), max(NUM_PROGRAMS // num_rows, 1))
    return 1 << (most.bit_length() - 1)


@jit
def _sample_kernel(
    token_ids: Pointer,
    logprobs: Pointer,
    logits: Pointer,
    temperature: Pointer,
    seeds: Pointer,
    positions: Pointer,
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
    if temperature is None:
        maximum, total, best, token = _scan(row_logits, begin, end, None, None, None, BLOCK)
    else:
        heat, seed = tl.load(temperature + row), tl.load(seeds + row)
        position = tl.load(positions + row).to(tl.int32)
        maximum, total, best, token = _scan(row_logits, begin, end, heat, seed, position, BLOCK)
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
def _scan(
    logits: Pointer,
    begin: Scalar,
    end: Scalar,
    heat: Scalar,
    seed: Scalar,
    position: Scalar,
    BLOCK: constexpr,
) -> Scalar:
    """Over tokens [begin, end): largest logit, sum of exp(logit - largest), best score, its first token."""
    # Finite where nothing was seen, so that differences are never NaN.
    maximum = -1.0e30
    total = 0.0
    best = float("-inf")
    best_token = begin
    for start in range(begin, end, BLOCK):
        # Four tokens share the four words of one Philox call.
        group = start // 4 + tl.arange(0, BLOCK // 4)
        token = group[:, None] * 4 + tl.arange(0, 4)[None, :]
        values = tl.load(logits + token, mask=token < end, other=float("-inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(values))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(values - new_maximum))
        maximum = new_maximum
        if heat is not None and heat > 0:
            values = values / heat + _gumbel(seed, position, group)
        block_best = tl.max(values)
        block_token = tl.min(tl.where(values == block_best, token, end - 1))
        best_token = tl.where(block_best > best, block_token, best_token)
        best = tl.maximum(best, block_best)
    return maximum, total, best, best_token


@jit
def _gumbel(seed: Scalar, position: Scalar, group: Scalar) -> Scalar:
    """[groups] → noise [groups, 4], as `gumbel_noise` computes it."""
    w0, w1, w2, w3 = tl.philox(seed, group, position, 0, 0)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (group.shape[0], 4))
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(uniform < 1e-3, uniform * (1.0 + 0.5 * uniform), -tl.log(1.0 - uniform))
    return -tl.log(exponential)
