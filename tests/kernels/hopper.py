"""Compiles every kernel to machine code of compute capability 9.0, in the configurations that are used; needs no GPU.

Triton asks its driver for the device and for launches: here a driver that knows an H200 and launches nothing. Prints a
line of JSON for each compiled kernel. Run as a program, because the tests themselves use the interpreter.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from legato.kernels import (
    activation,
    few_linear,
    gated_linear,
    grouped_linear,
    norm,
    patch_rotary,
    rotary,
    sample,
    small_linear,
)
from legato.kernels.attention import chunk as chunk_attention
from legato.kernels.attention import decode as decode_attention
from legato.kernels.attention import hopper as hopper_attention
from legato.kernels.attention import span as span_attention
from legato.kernels.attention import turned as turned_attention
from legato.kernels.device import DEFAULT
from legato.kernels.kv_format import EIGHT_BITS
from legato.kernels.lora import product
from legato.kernels.lora.pages import LoraPages, LoraPlace
from legato.kernels.lora.tiles import LoraGroups
from legato.kernels.paged_kv import PagedKV, Scoring
from legato.kernels.quantized import eight_bit, grouped, one_row, tiled, unpack
from legato.kernels.quantized.linear import tiled_config
from tests.kernels.quantized.operands import random_operand

BF16 = torch.bfloat16
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class Driver:
    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 30},
        load_binary=lambda name, binary, shared, device: (name, name, 0, 0, 1024),
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def report_compiled_kernels() -> None:
    load = CompiledKernel._init_handles

    def load_and_report(kernel: CompiledKernel) -> None:
        if kernel.module is None:
            load(kernel)
            ptx = kernel.asm["ptx"]
            facts = {
                "name": kernel.name,
                "shared": kernel.metadata.shared,
                "wgmma": ptx.count("wgmma.mma_async"),
                "fp8_wgmma": ptx.count(".e4m3.e4m3"),
                "mma": ptx.count("mma.sync"),
                "wide_loads": ptx.count(".v4.b32 {") + ptx.count("cp.async.cg"),
                "fused_bf16": ptx.count("fma.rn.bf16"),
                "overlaps": "griddepcontrol.wait" in ptx,
            }
            print(json.dumps(facts), flush=True)

    CompiledKernel._init_handles = load_and_report


def paged(sequences: int, dtype: torch.dtype = BF16) -> PagedKV:
    k_cache, v_cache = (torch.zeros(4, 16, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
    tables = torch.zeros(sequences, 4, dtype=torch.int32)
    return PagedKV(k_cache, v_cache, tables, torch.ones(sequences, dtype=torch.int32))


def compile_all() -> None:
    x, weight = torch.zeros(2, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16)
    norm._norm_triton(x, weight, None, 1e-5, False)
    norm._add_norm_triton(x, x.clone(), weight, None, 1e-5, False, inplace=True)
    norm._add_norm_triton(x, x.clone(), weight, weight, 1e-5, True, inplace=True)
    projection = torch.zeros(2, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=BF16)
    places, kv = torch.zeros(2, dtype=torch.int64), paged(2)
    for table in (torch.zeros(8, HEAD_DIM), torch.zeros(8, HEAD_DIM, dtype=BF16)):
        rotary._rotary_and_store_triton(projection, places, table, kv.k_cache, kv.v_cache, places)
    patches, angles = torch.zeros(2, 3 * HEADS, 80, dtype=BF16), torch.zeros(2, 40)
    patch_rotary._rotate_patches_triton(patches[:, : 2 * HEADS], angles, angles)
    activation._gate_and_mul_triton(torch.zeros(2, 2 * INNER, dtype=BF16), "silu")
    for sequences in (1, 8, 32, 256):
        q = torch.zeros(sequences, HEADS, HEAD_DIM, dtype=BF16)
        decode_attention._decode_attention_triton(q, paged(sequences), Scoring(0.1))
    for sequences in (1, 2):
        turned_attention._turned_triton(
            projection[:sequences],
            places[:sequences],
            torch.zeros(8, HEAD_DIM),
            paged(sequences),
            places[:sequences],
            Scoring(0.1),
        )
    for tokens in (4, 16, 512):
        q, starts = torch.zeros(tokens, HEADS, HEAD_DIM, dtype=BF16), torch.tensor([0, tokens], dtype=torch.int32)
        chunk_attention._chunk_attention_triton(q, paged(1), starts, Scoring(0.1))
    for head_dim in (64, 128, 256):
        keys, values = (torch.zeros(4, 16, KV_HEADS, head_dim, dtype=BF16) for _ in range(2))
        kv = PagedKV(keys, values, torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
        q, starts = torch.zeros(64, HEADS, head_dim, dtype=BF16), torch.tensor([0, 64], dtype=torch.int32)
        hopper_attention.hopper_attention(q, kv, starts, Scoring(0.1), torch.empty_like(q))
    for dtype in EIGHT_BITS:
        kv = paged(2, dtype)
        rotary._rotary_and_store_triton(projection, places, torch.zeros(8, HEAD_DIM), kv.k_cache, kv.v_cache, places)
        q, starts = torch.zeros(512, HEADS, HEAD_DIM, dtype=BF16), torch.tensor([0, 512], dtype=torch.int32)
        decode_attention._decode_attention_triton(q[:2], kv, Scoring(0.1))
        chunk_attention._chunk_attention_triton(q, paged(1, dtype), starts, Scoring(0.1))
    q, bias = torch.zeros(2, KV_HEADS, HEAD_DIM, dtype=BF16), torch.zeros(KV_HEADS, 129)
    for dtype in (BF16, *EIGHT_BITS):
        span_attention._span_attention_triton(q, paged(2, dtype), None, None)
        span_attention._span_attention_triton(q, paged(2, dtype), torch.zeros(2, dtype=torch.int32), bias)
    logits = torch.zeros(2, VOCAB, dtype=BF16)
    sample._greedy_triton(logits)
    packed = torch.zeros(2 * INNER, HIDDEN, dtype=BF16)
    gated_linear.gated_linear(torch.zeros(130, HIDDEN, dtype=BF16), packed, "silu")
    for linear, rows in (
        (small_linear._small_linear_triton, 1),
        (few_linear.few_linear, 2),
        (few_linear.few_linear, 16),
    ):
        rows_of_x = torch.zeros(rows, HIDDEN, dtype=BF16)
        linear(rows_of_x, packed, None)
        linear(rows_of_x, packed[:HIDDEN], weight)
    for tokens in (1, 4, 20, 40, 512):
        ids = torch.tensor([[0, 1]] * tokens)
        grouped_linear._group_rows_triton(ids, 2)
        groups, rows_of_x = grouped_linear._group_rows_torch(ids, 2), torch.zeros(tokens, HIDDEN, dtype=BF16)
        grouped_linear._grouped_linear_triton(rows_of_x, packed.view(2, INNER, HIDDEN), groups, torch.ones(2 * tokens))
    compile_quantized()
    compile_adapters()


def compile_quantized() -> None:
    """4-bit integers, the most common, in every way that they are multiplied."""
    operand = random_operand("int4", 512, HIDDEN, 128, zero=True)
    one_row.one_row_linear(torch.zeros(1, HIDDEN, dtype=BF16), operand)
    for rows, dtype in ((8, BF16), (256, torch.float8_e4m3fn)):
        config = tiled_config(rows, operand, dtype.itemsize, DEFAULT)
        scale = torch.ones(rows) if dtype.itemsize == 1 else None
        tiled.tiled_linear(torch.zeros(rows, HIDDEN, dtype=dtype), operand, config, scale, BF16)
    groups = grouped_linear._group_rows_torch(torch.tensor([[0, 1]]), 2)
    grouped.grouped_quantized_linear(torch.zeros(1, HIDDEN, dtype=BF16), operand, groups)
    unpack._unpacked_triton(operand, BF16, None)
    eight_bit._quantize_rows_triton(torch.zeros(2, HIDDEN, dtype=BF16), torch.float8_e4m3fn)
    activation._gate_rows_triton(torch.zeros(2, 2 * HIDDEN, dtype=BF16), "silu", torch.float8_e4m3fn)


def compile_adapters() -> None:
    place = LoraPlace(0, 0, 1 << 20, HIDDEN, (HIDDEN, 1024, 1024))
    pages = LoraPages(
        torch.zeros(64, 1 << 21, dtype=BF16), torch.zeros(65, 8, dtype=torch.int32), torch.ones(1, 65).int()
    )
    for tokens in (256, 2048):
        groups = LoraGroups(grouped_linear._group_rows_torch(torch.zeros(tokens, 1, dtype=torch.int64), 64))
        x, out = torch.zeros(tokens, HIDDEN, dtype=BF16), torch.zeros(tokens, HIDDEN + 2048, dtype=BF16)
        product._lora_add_triton(out, x, groups, pages, place, None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    driver.set_active(Driver())
    report_compiled_kernels()
    compile_all()
    # The same constant and option that a Hopper GPU gets when launches overlap.
    overlapping = {"OVERLAP": True, "launch_pdl": True}
    norm.launch_options = small_linear.launch_options = lambda tensor: overlapping
    norm._norm_triton(torch.zeros(1, HIDDEN, dtype=BF16), torch.ones(HIDDEN, dtype=BF16), None, 1e-5, False)
