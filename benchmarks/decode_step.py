"""A whole decode step of the 8B shape from these kernels: what the parts come to when they run one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_cases import (
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    QKV,
    SCORING,
    VOCAB,
    Case,
    Variant,
    distance,
    paged_sets,
    randn,
    random_angles,
)
from legato.kernels import overlap
from legato.kernels.activation import silu_and_mul
from legato.kernels.attention.decode import decode_attention
from legato.kernels.norm import add_rms_norm, rms_norm
from legato.kernels.paged_kv import PagedKV
from legato.kernels.rotary import rotary_and_store
from legato.kernels.sample import greedy_sample
from legato.kernels.small_linear import small_linear

NUM_LAYERS = 32
Linear = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Layer:
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    norms: Tensor  # [2, HIDDEN]


def random_weight(out_features: int, in_features: int) -> Tensor:
    return randn(out_features, in_features).mul_(in_features**-0.5)


class DecodeStep:
    def __init__(self, layers: list[Layer], head: Tensor, batch: int, context: int) -> None:
        self.layers, self.head, self.norm = layers, head, torch.ones_like(head[0])
        self.caches = paged_sets([context] * batch, NUM_LAYERS)
        self.x = randn(batch, HIDDEN)
        self.angles = random_angles(context)
        self.positions = torch.full((batch,), context - 1, device="cuda")
        tables, block_size = self.caches[0].block_tables, self.caches[0].k_cache.shape[1]
        self.slots = tables[:, (context - 1) // block_size].long() * block_size + (context - 1) % block_size

    def attend(self, qkv: Tensor, kv: PagedKV) -> Tensor:
        rotary_and_store(qkv, self.positions, self.angles, kv.k_cache, kv.v_cache, self.slots)
        return decode_attention(qkv.view(qkv.shape[0], -1, HEAD_DIM)[:, :HEADS], kv, SCORING).flatten(1)

    def run(self, linear: Linear) -> Tensor:
        """Nine launches a layer. Returns the logits, which keep more of an error than tokens do."""
        x, total = torch.zeros_like(self.x), self.x.clone()
        for layer, kv in zip(self.layers, self.caches, strict=True):
            x, total = add_rms_norm(x, total, layer.norms[0], EPS, inplace=True)
            x = linear(self.attend(linear(x, layer.qkv), kv), layer.output)
            x, total = add_rms_norm(x, total, layer.norms[1], EPS, inplace=True)
            x = linear(silu_and_mul(linear(x, layer.gate_up)), layer.down)
        logits = linear(rms_norm(x + total, self.norm, EPS), self.head)
        greedy_sample(logits)
        return logits

    def error(self) -> float:
        """Between the two products; NaN if overlapping launches change a single bit."""
        logits = self.run(small_linear).clone()
        overlap.OVERLAP_LAUNCHES = True
        same = all(torch.equal(logits, self.run(small_linear)) for _ in range(5))
        overlap.OVERLAP_LAUNCHES = False
        return distance(logits, self.run(F.linear).double()) if same else float("nan")


def step_cases() -> Iterator[Case]:
    layers = [
        Layer(
            random_weight(QKV, HIDDEN),
            random_weight(HIDDEN, HIDDEN),
            random_weight(2 * INNER, HIDDEN),
            random_weight(HIDDEN, INNER),
            torch.ones(2, HIDDEN, dtype=torch.bfloat16, device="cuda"),
        )
        for _ in range(NUM_LAYERS)
    ]
    head = random_weight(VOCAB, HIDDEN)
    weights = 2 * (NUM_LAYERS * HIDDEN * (QKV + HIDDEN + 3 * INNER) + VOCAB * HIDDEN)
    for batch, context in ((1, 256), (8, 256), (64, 256), (256, 256)):
        step = DecodeStep(layers, head, batch, context)
        products: dict[str, Linear] = {"small_linear": small_linear} if batch <= 8 else {}
        variants = [
            Variant(f"{name}, overlapping launches" if overlapping else name, [partial(step.run, linear)], overlapping)
            for name, linear in (products | {"cuBLAS": F.linear}).items()
            for overlapping in (False, True)
        ]
        yield Case(
            "decode step",
            f"{batch} x {context}",
            variants,
            step.error if batch <= 8 else None,
            bytes=weights + batch * context * 2 * NUM_LAYERS * KV_HEADS * HEAD_DIM * 2,
            flops=weights * batch,
            tolerance=0.05,
        )
