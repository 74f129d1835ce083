"""What `benchmarks.kernels` measures: the kernels at the shapes of Llama-3.1-8B in bf16, each with its rivals.

A case is made, measured and dropped before the next is made. Its calls go over several sets of inputs, enough of them
that none is still in the cache when its turn comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from legato.kernels import activation, norm, rotary, sample
from legato.kernels.attention.chunk import ChunkConfig, chunk_attention
from legato.kernels.attention.configs import DecodeConfig
from legato.kernels.attention.decode import decode_attention
from legato.kernels.attention.prompt import prompt_attention
from legato.kernels.few_linear import FewConfig, few_linear
from legato.kernels.paged_kv import PagedKV, Scoring, ragged_attention_torch
from legato.kernels.small_linear import LinearConfig, small_linear

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 128256, 16
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SCORING = Scoring(HEAD_DIM**-0.5)
CACHE_BYTES = 60 << 20
EPS = 1e-5


@dataclass
class Variant:
    name: str
    calls: list[Callable[[], Any]]  # one for each set of inputs
    overlap: bool = False  # with overlapping launches


@dataclass
class Case:
    kernel: str
    shape: str
    variants: list[Variant]  # ours in its standing configuration first, then rivals
    error: Callable[[], float] | None  # ‖ours - float64‖ / ‖float64‖
    bytes: float = 0.0  # moved by one call, each once
    flops: float = 0.0
    sweep: list[Variant] = field(default_factory=list)
    tolerance: float = 1e-2


def all_cases() -> Iterator[Case]:
    yield from linear_cases()
    for lengths in ([256], [4096], [256] * 8, [512] * 32, [256] * 256, [1024] * 256):
        yield decode_case(f"{len(lengths)} x {lengths[0]}", lengths)
    for lengths in ([32768], [131072], [32768] * 16, [131072] + [300] * 63):
        yield decode_case(f"{len(lengths)} x {lengths[0]} to {lengths[-1]}", lengths)
    yield decode_case("256 x 64 to 1536", torch.linspace(64, 1536, 256).int().tolist())
    for sequences, cached, queries in ((16, 0, 2048), (1, 0, 2048), (4, 1536, 512), (64, 0, 128), (1, 30720, 2048)):
        yield chunk_case(sequences, cached, queries)
    for tokens in (1, 256, 8192):
        yield from (norm_case(tokens), add_norm_case(tokens), gate_case(tokens), rotary_case(tokens))
    for rows, dtype in ((1, torch.bfloat16), (64, torch.bfloat16), (256, torch.bfloat16), (256, torch.float32)):
        yield sample_case(rows, dtype)


def each(name: object, function: Callable[..., Any], sets: Iterable[Any]) -> Variant:
    return Variant(str(name), [partial(function, inputs) for inputs in sets])


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def num_sets(bytes_per_set: float) -> int:
    return max(2, min(128, int(4 * CACHE_BYTES / bytes_per_set) + 1))


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def repeatable(call: Callable[[], Tensor]) -> Tensor:
    """The result of a kernel whose programs meet at the end; if it changes between runs they have raced: NaN."""
    first = call()
    return first if all(torch.equal(first, call()) for _ in range(30)) else torch.full_like(first, float("nan"))


def norm_case(tokens: int) -> Case:
    x, weight = randn(num_sets(tokens * HIDDEN * 2), tokens, HIDDEN), randn(HIDDEN)

    def ours(x: Tensor) -> Tensor:
        return norm.rms_norm(x, weight, EPS)

    def error() -> float:
        return distance(ours(x[0]), norm._rms_norm_torch(x[0].double(), weight, EPS))

    shape = f"{tokens} x {HIDDEN}"
    return Case("rms_norm", shape, [each("legato", ours, x)], error, bytes=4 * tokens * HIDDEN)


def add_norm_case(tokens: int) -> Case:
    pairs, weight = randn(num_sets(tokens * HIDDEN * 4), 2, tokens, HIDDEN), randn(HIDDEN)

    def ours(pair: Tensor) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(pair[0], pair[1], weight, EPS)

    def error() -> float:
        total = pairs[0, 0] + pairs[0, 1]
        normed, actual_total = ours(pairs[0])
        return distance(normed, norm._rms_norm_torch(total.double(), weight, EPS)) + distance(actual_total, total)

    shape = f"{tokens} x {HIDDEN}"
    return Case("add_rms_norm", shape, [each("legato", ours, pairs)], error, bytes=8 * tokens * HIDDEN)


def gate_case(tokens: int) -> Case:
    gate_up = randn(num_sets(tokens * INNER * 4), tokens, 2 * INNER)

    def plain(gate_up: Tensor) -> Tensor:
        return F.silu(gate_up[:, :INNER]) * gate_up[:, INNER:]

    def error() -> float:
        expected = activation._gate_and_mul_torch(gate_up[0].double(), "silu")
        return distance(activation.silu_and_mul(gate_up[0]), expected)

    variants = [each("legato", activation.silu_and_mul, gate_up), each("torch", plain, gate_up)]
    return Case("silu_and_mul", f"{tokens} x {INNER}", variants, error, bytes=6 * tokens * INNER)


def rotary_case(tokens: int) -> Case:
    projections = randn(num_sets(tokens * QKV * 2), tokens, QKV)
    k_cache, v_cache = (randn(tokens // BLOCK_SIZE + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2))
    places = torch.arange(tokens, device="cuda")
    angles = random_angles(tokens)

    def ours(projection: Tensor) -> None:
        rotary.rotary_and_store(projection, places, angles, k_cache, v_cache, places)

    def error() -> float:
        wide, caches, turned = projections[0].double(), (k_cache.double(), v_cache.double()), projections[0].clone()
        rotary._rotary_and_store_torch(wide, places, angles.double(), *caches, places)
        ours(turned)
        return distance(turned, wide) + distance(k_cache, caches[0]) + distance(v_cache, caches[1])

    # Queries and keys are read and written, keys written once more; values read and written.
    moved = 2 * tokens * (2 * HEADS + 3 * KV_HEADS + 2 * KV_HEADS) * HEAD_DIM
    shape = f"{tokens} x {HEADS}/{KV_HEADS}"
    return Case("rotary_and_store", shape, [each("legato", ours, projections)], error, bytes=moved)


def random_angles(positions: int) -> Tensor:
    """[positions, HEAD_DIM]: cosines, then sines."""
    angles = torch.randn(positions, HEAD_DIM // 2, device="cuda")
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def paged_sets(lengths: list[int], count: int) -> list[PagedKV]:
    """Sequences of these lengths, their blocks in random order, in `count` caches."""
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, part in enumerate(torch.randperm(sum(blocks), dtype=torch.int32).split(blocks)):
        tables[row, : len(part)] = part
    on_device = tables.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda")
    caches = randn(count, 2, sum(blocks), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return [PagedKV(keys, values, *on_device) for keys, values in caches]


def doubled(kv: PagedKV) -> PagedKV:
    return PagedKV(kv.k_cache.double(), kv.v_cache.double(), kv.block_tables, kv.context_lens)


def decode_case(name: str, lengths: list[int]) -> Case:
    moved = sum(lengths) * 2 * KV_HEADS * HEAD_DIM * 2
    sets, q = paged_sets(lengths, num_sets(moved)), randn(len(lengths), HEADS, HEAD_DIM)

    def ours(kv: PagedKV, config: DecodeConfig | None = None) -> Tensor:
        return decode_attention(q, kv, SCORING, config=config)

    def error() -> float:
        expected = ragged_attention_torch(q.double(), doubled(sets[0]), torch.arange(len(lengths) + 1), SCORING)
        return distance(repeatable(lambda: ours(sets[0])), expected)

    sweep = [each(config, partial(ours, config=config), sets) for config in decode_candidates(len(lengths))]
    return Case("decode_attention", name, [each("legato", ours, sets)], error, bytes=moved, sweep=sweep)


def decode_candidates(num_sequences: int) -> list[DecodeConfig]:
    """Programs of a head besides one for each sequence, blocks of keys in the shortest split, keys in a block, warps,
    stages."""
    if num_sequences <= 64:
        grid = product((32, 64, 128, 256), (1, 2), (32, 64), (2, 4), (2, 3))
    else:
        grid = product((32, 128), (8, 16), (32, 64, 128), (1, 2, 4), (2, 3))
    return [DecodeConfig(extra, n * blocks, n, warps, stages) for extra, blocks, n, warps, stages in grid]


def chunk_case(sequences: int, cached: int, queries: int) -> Case:
    projections = randn(2, sequences * queries, QKV // HEAD_DIM, HEAD_DIM)
    kv = paged_sets([cached + queries] * sequences, 1)[0]
    starts = torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32, device="cuda")

    def ours(projection: Tensor, config: ChunkConfig | None = None) -> Tensor:
        return chunk_attention(projection[:, :HEADS], kv, starts, SCORING, config=config)

    def error() -> float:
        """Of the last two sequences: a float64 reference of all would take longer than the benchmark."""
        last = max(sequences - 2, 0)
        part, first = doubled(kv.sequences(last, sequences)), last * queries
        q = projections[0, first:, :HEADS].double()
        return distance(ours(projections[0])[first:], ragged_attention_torch(q, part, starts[last:], SCORING))

    # Two products of every query with the keys it sees.
    seen = sequences * (queries * cached + queries * (queries + 1) // 2)
    rivals = prompt_rivals(projections, sequences, queries) if cached == 0 else []
    return Case(
        "chunk_attention",
        f"{sequences} x {queries}" + (f" after {cached}" if cached else ""),
        [each("legato", ours, projections), *rivals],
        error,
        flops=4 * HEADS * HEAD_DIM * seen,
        sweep=[each(config, partial(ours, config=config), projections) for config in chunk_candidates()],
    )


def chunk_candidates() -> list[ChunkConfig]:
    return [
        *(ChunkConfig(128, n, 8, stages, registers) for n, stages, registers in product((32, 64), (2, 3), (None, 128))),
        *(ChunkConfig(64, n, 4, 3, registers) for n, registers in product((32, 64), (None, 128, 168))),
        ChunkConfig(128, 128, 8, 2),
        ChunkConfig(128, 128, 8, 3),
        ChunkConfig(64, 128, 4, 3),
    ]


def prompt_rivals(projections: Tensor, sequences: int, queries: int) -> list[Variant]:
    def cudnn(projection: Tensor) -> Tensor:
        parts = projection.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return prompt_attention(*parts, [queries] * sequences, SCORING.scale)

    def flash(projection: Tensor) -> Tensor:
        parts = projection.unflatten(0, (sequences, queries)).transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)

    return [each("prompt_attention (cuDNN)", cudnn, projections), each("torch flash", flash, projections)]


def sample_case(rows: int, dtype: torch.dtype) -> Case:
    size = rows * VOCAB * dtype.itemsize
    logits = torch.randn(min(num_sets(size), 64), rows, VOCAB, device="cuda").to(dtype)

    def plain(logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.argmax(-1), logits.logsumexp(-1)

    def error() -> float:
        """Of the log probabilities. A token that differs counts as NaN."""
        token_ids = repeatable(lambda: sample.greedy_sample(logits[0])[0].float()).long()
        expected_ids, expected = sample._greedy_torch(logits[0])
        right = torch.equal(token_ids, expected_ids)
        return distance(sample.greedy_sample(logits[0])[1], expected.double()) if right else float("nan")

    variants = [
        each("greedy", sample.greedy_sample, logits),
        each("torch argmax, logsumexp", plain, logits),
    ]
    return Case("sample", f"{rows} x {VOCAB} {str(dtype)[6:]}", variants, error, bytes=size)


def linear_cases() -> Iterator[Case]:
    shapes = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    for name, (out_features, in_features) in (shapes | {"head": (VOCAB, HIDDEN)}).items():
        weights = randn(num_sets(2 * out_features * in_features), out_features, in_features)
        for rows in (1, 2, 8, 16):
            yield linear_case(name, randn(rows, in_features), weights)


def linear_case(name: str, x: Tensor, weights: Tensor) -> Case:
    rows = x.shape[0]

    def ours(weight: Tensor, config: LinearConfig | FewConfig | None = None) -> Tensor:
        if isinstance(config, FewConfig):
            return few_linear(x, weight, config=config)
        return small_linear(x, weight, config=config)

    def error() -> float:
        return distance(repeatable(lambda: ours(weights[0])), x.double() @ weights[0].double().T)

    return Case(
        "small_linear",
        f"{name}, {rows} rows",
        [each("legato", ours, weights), each("F.linear", partial(F.linear, x), weights)],
        error,
        bytes=weights[0].nbytes,
        sweep=[each(config, partial(ours, config=config), weights) for config in linear_candidates(rows)],
    )


def linear_candidates(num_rows: int) -> list[LinearConfig] | list[FewConfig]:
    if num_rows > 1:
        tiles = ((16, 128, 1), (32, 128, 2), (64, 64, 4), (64, 128, 4))
        return [FewConfig(*tile, split) for tile, split in product(tiles, (1, 2, 4, 8))]
    blocks = ((512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8))
    vectors = [LinearConfig(rows, *block) for rows, block in product((2, 4, 8), blocks)]
    splits = [LinearConfig(rows, 1024, 4, split_k=split) for rows, split in product((4, 8), (2, 4))]
    return [*vectors, *splits]
