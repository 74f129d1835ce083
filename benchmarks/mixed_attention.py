"""Times the attention of decodes beside prompts on a Hopper GPU: `python -m benchmarks.mixed_attention`.

Once in two launches, once in one with the decodes as tiles of one token, and what the prompt takes alone. 32 query and
8 key heads of 128 in bf16, pages of 16 tokens in no order. Results of both are compared first; the table comes last.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernel_cases import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, SCORING, distance
from benchmarks.kernels import replay_seconds
from legato.kernels import overlap
from legato.kernels.attention.chunk import chunk_attention
from legato.kernels.attention.decode import decode_attention
from legato.kernels.attention.mixed import MixedLengths
from legato.kernels.paged_kv import PagedKV, ragged_attention_torch

# Tokens of the prompt, behind how many; decodes, and their contexts.
CASES = (
    (200, 500, 5, 300),
    (1024, 28_000, 3, 33_000),
    (1024, 28_000, 7, 33_000),
    (1152, 18_000, 4, 33_000),
    (1536, 8_000, 2, 33_000),
    (1792, 2_048, 32, 4_200),
    (1792, 1_000, 16, 4_200),
    (1664, 3_000, 60, 4_200),
    (2048, 2_048, 64, 400),
    (1152, 30_000, 64, 500),
    (1500, 500, 256, 300),
)


def cache_of(lengths: list[int]) -> PagedKV:
    num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(num_blocks)).int()
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    for row, blocks in enumerate(order.split(num_blocks)):
        tables[row, : len(blocks)] = blocks
    shape = (sum(num_blocks), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return PagedKV(keys, values, tables.cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def microseconds(call: Callable[[], object]) -> float:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    replay_seconds(graph)
    return statistics.median(replay_seconds(graph) for _ in range(12)) / 8 * 1e6


def measure(tokens: int, context: int, decodes: int, length: int) -> list[str]:
    kv = cache_of([length] * decodes + [context + tokens])
    q = torch.randn(decodes + tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([*range(decodes + 1), decodes + tokens], dtype=torch.int32, device="cuda")
    alone, beside = (PagedKV(kv.k_cache, kv.v_cache, kv.block_tables[part], kv.context_lens[part]) for part in
                     (slice(decodes, None), slice(0, decodes)))  # fmt: skip

    def chunk(out: Tensor) -> None:
        chunk_attention(q[decodes:], alone, starts[decodes:], SCORING, out[decodes:])

    def separate(out: Tensor) -> Tensor:
        decode_attention(q[:decodes], beside, SCORING, out[:decodes])
        chunk(out)
        return out

    def shared(out: Tensor) -> Tensor:
        return chunk_attention(q, kv, starts, SCORING, out, num_singles=decodes)

    first, second = separate(torch.full_like(q, 7.0)), shared(torch.full_like(q, 7.0))
    errors = [
        distance(second[:decodes], first[:decodes].double()),
        distance(second[decodes:], first[decodes:].double()),
    ]
    if tokens <= 256:
        errors.append(distance(second, ragged_attention_torch(q.double(), kv, starts, SCORING).double()))
    same = torch.equal(second, shared(torch.full_like(q, 3.0)))
    out = torch.empty_like(q)
    times = [microseconds(lambda way=way: way(out)) for way in (chunk, separate, shared)]
    lengths = MixedLengths(decodes, decodes * length, length, tokens * (context + tokens // 2))
    pays = lengths.share_a_launch(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, 132)
    return [
        f"{tokens} behind {context}, {decodes} x {length}",
        *(f"{time:.0f}" for time in times),
        f"{times[1] / times[2]:.2f}",
        "shared" if pays else "separate",
        " ".join(f"{error:.0e}" for error in errors) + ("" if same else ", NOT REPEATABLE"),
    ]


def main() -> None:
    torch.manual_seed(0)
    overlap.OVERLAP_LAUNCHES = True
    rows = []
    for case in CASES:
        rows.append(measure(*case))
        print(rows[-1], flush=True)
    header = ["", "prompt alone", "separate", "shared", "ratio", "rule", "errors of decodes, of prompt"]
    for row in (header, *rows):
        print(f"{row[0]:34}" + "".join(f"{cell:>14}" for cell in row[1:]))


if __name__ == "__main__":
    main()
