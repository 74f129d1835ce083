"""Compiles every kernel in every configuration that may be chosen for a card; needs no GPU.

    python -m tests.kernels.cards 86             # all head sizes and dtypes; one card for each process
    python -m tests.kernels.cards 86 --quick     # only what needs the most shared memory
    python -m tests.kernels.cards 86 --only lora # only shapes whose name contains this, as the output has them

Prints a line of JSON for each compiled kernel: its name, card, shape, shared memory, and registers of a program. What
does not compile is printed with its error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from legato.kernels import (
    activation,
    device,
    few_linear,
    gated_linear,
    grouped_linear,
    norm,
    patch_rotary,
    rotary,
    sample,
    small_linear,
)
from legato.kernels import rows as row_kernels
from legato.kernels.attention import chunk, decode, hopper, span, turned
from legato.kernels.device import GpuLimits
from legato.kernels.kv_format import EIGHT_BITS, KVScales
from legato.kernels.lora import product
from legato.kernels.lora.pages import LoraPages, LoraPlace
from legato.kernels.lora.tiles import LoraGroups
from legato.kernels.paged_kv import PagedKV, Scoring
from legato.kernels.quantized import eight_bit, grouped, linear, unpack
from legato.kernels.recurrent import convolution, delta_rule, selective_scan
from legato.kernels.recurrent.states import StateBlocks, StateSequences
from tests.kernels.hopper import Driver
from tests.kernels.quantized.operands import random_operand

# Shared memory of one program, from the compute capability table of the CUDA programming guide.
CARDS = {
    sm: GpuLimits(sm, kib * 1024)
    for sm, kib in ((75, 64), (80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99))
}
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
KV_HEADS = 8


@dataclass(frozen=True)
class Shape:
    head_dim: int
    dtype: torch.dtype
    group: int = 4
    cache_dtype: torch.dtype | None = None

    def paged(self, sequences: int) -> PagedKV:
        keys, values = (
            torch.zeros(4, 16, KV_HEADS, self.head_dim, dtype=self.cache_dtype or self.dtype) for _ in range(2)
        )
        tables = torch.zeros(sequences, 4, dtype=torch.int32)
        scales = None if self.cache_dtype is None else KVScales(2.0, 3.0)
        return PagedKV(keys, values, tables, torch.ones(sequences, dtype=torch.int32), scales=scales)

    def queries(self, count: int) -> torch.Tensor:
        return torch.zeros(count, KV_HEADS * self.group, self.head_dim, dtype=self.dtype)


def dtypes(limits: GpuLimits) -> tuple[torch.dtype, ...]:
    """bfloat16 needs 8.0."""
    return (torch.float32, torch.float16, *((torch.bfloat16,) if limits.sm >= 80 else ()))


def shapes(limits: GpuLimits, quick: bool) -> Iterator[Shape]:
    """Every head size and dtype, Falcon's 71 query heads for one key head, and caches of 8 bits from 8.9 on."""
    if quick:
        yield from (Shape(128, torch.float32), Shape(256, torch.float16), Shape(128, torch.float16))
        return
    yield from itertools.starmap(Shape, itertools.product(HEAD_DIMS, dtypes(limits)))
    yield from (Shape(64, dtype, group=71) for dtype in dtypes(limits))
    if limits.sm >= 89:
        yield from (Shape(head_dim, torch.bfloat16, 4, eight) for head_dim in (64, 128, 256) for eight in EIGHT_BITS)


def attention_launches(shape: Shape, limits: GpuLimits, quick: bool) -> Iterator[Callable[[], Any]]:
    scoring = Scoring(0.1)
    for tokens in (512,) if quick else (1, 16, 512):
        q, starts = shape.queries(tokens), torch.tensor([0, tokens], dtype=torch.int32)
        yield partial(chunk._chunk_attention_triton, q, shape.paged(1), starts, scoring)
    for sequences in (64,) if quick else (1, 8, 32, 64, 128, 256):  # one for each case of `decode_config`
        yield partial(decode._decode_attention_triton, shape.queries(sequences), shape.paged(sequences), scoring)
    if quick:
        return
    q = torch.zeros(2, KV_HEADS, shape.head_dim, dtype=shape.dtype)
    yield partial(span._span_attention_triton, q, shape.paged(2), None, torch.zeros(KV_HEADS, 129))
    if limits.overlaps_launches and shape.head_dim in turned.HEAD_DIMS and shape.cache_dtype is None:
        places = torch.zeros(2, dtype=torch.int64)
        qkv = torch.zeros(2, KV_HEADS * (shape.group + 2) * shape.head_dim, dtype=shape.dtype)
        angles = torch.zeros(8, shape.head_dim)
        yield partial(turned._turned_triton, qkv, places, angles, shape.paged(2), places, scoring)
    if shape.cache_dtype is not None:
        kv, places = shape.paged(2), torch.zeros(2, dtype=torch.int64)
        qkv = torch.zeros(2, KV_HEADS * (shape.group + 2) * shape.head_dim, dtype=shape.dtype)
        angles, caches = torch.zeros(8, shape.head_dim, dtype=shape.dtype), (kv.k_cache, kv.v_cache)
        yield partial(rotary._rotary_and_store_triton, qkv, places, angles, *caches, places, kv.scales)
    tokens = 64
    q, starts = shape.queries(tokens), torch.tensor([0, tokens], dtype=torch.int32)
    if limits.sm == 90 and hopper.suits(q, shape.paged(1), scoring):
        yield partial(hopper.hopper_attention, q, shape.paged(1), starts, scoring, torch.empty_like(q))


def scored_launches(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What changes scores: gpt-oss's sinks behind windows, Gemma 2's soft caps, ALiBi."""
    for name, shape, scoring in (
        ("sinks", Shape(64, dtype, group=8), Scoring(0.1, window=128, sinks=torch.zeros(KV_HEADS * 8))),
        ("soft cap", Shape(256, dtype, group=2), Scoring(0.1, window=4096, soft_cap=50.0)),
        ("ALiBi", Shape(128, dtype, group=1), Scoring(0.1, alibi_slopes=torch.zeros(KV_HEADS))),
    ):
        for tokens in (4, 512):
            q, starts = shape.queries(tokens), torch.tensor([0, tokens], dtype=torch.int32)
            yield name, partial(chunk._chunk_attention_triton, q, shape.paged(1), starts, scoring)
        for sequences in (1, 32, 256):
            q = shape.queries(sequences)
            yield name, partial(decode._decode_attention_triton, q, shape.paged(sequences), scoring)


def row_launches() -> Iterator[Callable[[], Any]]:
    """Kernels of whole numbers, which have no dtype."""
    numbers = torch.zeros(2, dtype=torch.int32)
    tables = row_kernels.RowTables(
        torch.zeros(3, 4, dtype=torch.int32), numbers, torch.zeros(3, dtype=torch.int64), 16, 2
    )
    yield partial(row_kernels._gather_rows_triton, numbers, tables)
    yield partial(row_kernels._advance_rows_triton, numbers, torch.zeros(2, dtype=torch.int64), tables)
    yield partial(grouped_linear._group_rows_triton, torch.zeros(4, 2, dtype=torch.int64), 8)


def other_launches(dtype: torch.dtype, limits: GpuLimits) -> Iterator[Callable[[], Any]]:
    hidden, inner = 4096, 14336
    x, weight = torch.zeros(2, hidden, dtype=dtype), torch.ones(hidden, dtype=dtype)
    packed = torch.zeros(2 * inner, hidden, dtype=dtype)
    yield partial(norm._norm_triton, x, weight, None, 1e-5, False)
    yield partial(norm._add_norm_triton, x, x.clone(), weight, weight, 1e-5, True, inplace=True)
    yield partial(activation._gate_and_mul_triton, torch.zeros(2, 2 * inner, dtype=dtype), "gelu")
    yield partial(sample._greedy_triton, torch.zeros(2, 128256, dtype=dtype))
    yield partial(small_linear._small_linear_triton, x[:1], packed, None)
    patches, angles = torch.zeros(2, 32, 80, dtype=dtype), torch.zeros(2, 40)
    yield partial(patch_rotary._rotate_patches_triton, patches, angles, angles)
    shape = Shape(128, dtype)
    kv, places = shape.paged(2), torch.zeros(2, dtype=torch.int64)
    projection = torch.zeros(2, 6 * KV_HEADS * 128, dtype=dtype)
    yield partial(
        rotary._rotary_and_store_triton,
        projection,
        places,
        torch.zeros(8, 128, dtype=dtype),
        kv.k_cache,
        kv.v_cache,
        places,
    )
    if limits.overlaps_launches and dtype.itemsize == 2:
        for rows in (2, 16):
            yield partial(few_linear.few_linear, torch.zeros(rows, hidden, dtype=dtype), packed)
    if limits.sm == 90 and dtype.itemsize == 2:
        yield partial(gated_linear.gated_linear, torch.zeros(1024, hidden, dtype=dtype), packed, "silu")
    for tokens in (1, 4, 20, 40, 512):
        ids = torch.tensor([[0, 1]] * tokens)
        yield partial(
            grouped_linear._grouped_linear_triton,
            torch.zeros(tokens, hidden, dtype=dtype),
            packed.view(2, inner, hidden),
            grouped_linear._group_rows_torch(ids, 2),
            torch.ones(2 * tokens),
        )


def state_launches(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Of Mamba 2.8B and Qwen3-Next."""
    channels, size, width, tokens = 5120, 16, 4, torch.ones(2, dtype=torch.int32)
    caches = (torch.zeros(4, channels // 2, size + width - 1) for _ in range(2))
    tables = torch.zeros(2, 4, dtype=torch.int32)
    sequences = StateSequences(tables, tokens, tokens, tokens, tokens, 256)
    blocks = StateBlocks(*caches, sequences)
    x, scanned, decay = torch.zeros(2, channels, dtype=dtype), torch.zeros(2, size, dtype=dtype), torch.ones(channels)
    yield partial(convolution._convolution_triton, x, torch.zeros(channels, width, dtype=dtype), x[0], size, blocks)
    rates = torch.zeros(channels, size)
    yield partial(selective_scan._scan_triton, x, x, rates, scanned, scanned, decay, x, blocks)
    heads, states = torch.zeros(2, 32, dtype=dtype), torch.zeros(4, 32, 128, 128)
    qkv, inputs = torch.zeros(2, 8192, dtype=dtype), torch.zeros(4, 8192, width - 1)
    whole, rates = StateBlocks(inputs, inputs[:, :0], sequences), torch.zeros(32)
    yield partial(convolution._convolution_triton, qkv, torch.zeros(8192, width, dtype=dtype), None, 0, whole)
    yield partial(delta_rule._delta_triton, qkv, heads, heads, rates, rates, states, sequences)


def lora_products(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    place = LoraPlace(0, 0, 1 << 20, 4096, (4096, 1024, 1024))
    pages = LoraPages(
        torch.zeros(32, 1 << 21, dtype=dtype), torch.zeros(33, 32, dtype=torch.int32), torch.ones(1, 33).int()
    )
    for tokens in (16, 2048):
        groups = LoraGroups(grouped_linear._group_rows_torch(torch.zeros(tokens, 1, dtype=torch.int64), 32))
        x, out = torch.zeros(tokens, 4096, dtype=dtype), torch.zeros(tokens, 6144, dtype=dtype)
        yield partial(product._lora_add_triton, out, x, groups, pages, place, None)


def quantized_launches(dtype: torch.dtype, limits: GpuLimits) -> Iterator[Callable[[], Any]]:
    """Every form, at row counts for which every configuration is chosen."""
    if dtype.itemsize != 2:
        return
    hidden, inner = 4096, 1024
    for form, group, zero in (
        ("int4", 128, True),
        ("int4", 32, True),
        ("int4", 32, "minimum"),
        ("int4", 16, "minimum"),
        ("table", 64, False),
        ("table", 32, False),
        ("codes", 128, True),
        ("codes", 32, "minimum"),
        ("int8", hidden, False),
        ("int8", 32, False),
        ("int8", 16, False),
        ("fp8", hidden, False),
        ("fp8", 128, False),
    ):
        operand = random_operand(form, inner, hidden, group, zero)
        for rows in (1, 8, 16, 32, 64, 256):
            x = torch.zeros(rows, hidden, dtype=dtype)
            run = linear._KERNELS[linear.kernel_for(rows, operand, limits)]
            yield partial(run, x, operand, None, None)
        groups = grouped_linear._group_rows_torch(torch.tensor([[0, 1]] * 4), 2)
        yield partial(grouped.grouped_quantized_linear, torch.zeros(4, hidden, dtype=dtype), operand, groups)
        if operand.is_packed or (operand.has_small_groups and form != "fp8"):
            yield partial(unpack._unpacked_triton, operand, dtype, None)
    for eight in (torch.int8, *((torch.float8_e4m3fn,) if limits.sm >= 89 else ())):
        x, weight = torch.zeros(2, hidden, dtype=dtype), torch.ones(hidden, dtype=dtype)
        yield partial(eight_bit._quantize_rows_triton, x, eight)
        yield partial(norm._add_norm_triton, x, x.clone(), weight, None, 1e-5, False, True, eight)
        yield partial(activation._gate_rows_triton, torch.zeros(2, 2 * 14336, dtype=dtype), "silu", eight)


def registers_of(cubin: bytes) -> int:
    """Of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(word[4:]) for word in usage.stdout.split() if word.startswith("REG:"))


def record_compiled(compiled: list[CompiledKernel]) -> None:
    load = CompiledKernel._init_handles

    def load_and_record(kernel: CompiledKernel) -> None:
        if kernel.module is None:
            compiled.append(kernel)
        load(kernel)

    CompiledKernel._init_handles = load_and_record


def named_launches(limits: GpuLimits, quick: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    for shape in shapes(limits, quick):
        name = f"{shape.head_dim} {str(shape.dtype)[6:]} group {shape.group} cache {shape.cache_dtype}"
        yield from ((name, launch) for launch in attention_launches(shape, limits, quick))
    if quick:
        return
    yield from (("rows", launch) for launch in row_launches())
    eight_bit.kernel_or_torch = lambda tensor, kernel, reference: kernel  # type: ignore[assignment]
    for dtype in dtypes(limits):
        kind = str(dtype)[6:]
        yield from ((f"{name} {kind}", launch) for name, launch in scored_launches(dtype))
        yield from ((f"products {kind}", launch) for launch in other_launches(dtype, limits))
        yield from ((f"lora {kind}", launch) for launch in lora_products(dtype))
        yield from ((f"states {kind}", launch) for launch in state_launches(dtype))
        yield from ((f"quantized {kind}", launch) for launch in quantized_launches(dtype, limits))


def compile_for(sm: int, quick: bool, part: int, num_parts: int, only: str = "") -> None:
    device.DEFAULT = limits = CARDS[sm]
    Driver.get_current_target = lambda self: GPUTarget("cuda", sm, 32)  # type: ignore[method-assign]
    driver.set_active(Driver())
    compiled: list[CompiledKernel] = []
    record_compiled(compiled)
    launches = [(name, launch) for name, launch in named_launches(limits, quick) if only in name]
    for shape_name, launch in launches[part::num_parts]:
        facts: dict[str, Any] = {"card": sm, "shape": shape_name}
        try:
            launch()
        except Exception as error:
            print(json.dumps(facts | {"error": f"{type(error).__name__}: {error}"[:500]}), flush=True)
        for kernel in compiled:
            num_registers = registers_of(kernel.asm["cubin"]) * kernel.metadata.num_warps * 32
            facts |= {"name": kernel.name, "shared": kernel.metadata.shared, "registers": num_registers}
            print(json.dumps(facts), flush=True)
        compiled.clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("card", type=int, choices=CARDS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("NUMBER", "OF"), help="for parallel runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compile_for(options.card, options.quick, *options.part, options.only)


if __name__ == "__main__":
    main()
