"""Times whole decode steps of 1 to 16 rows of the 8B shape: `python -m benchmarks.small_batches`.

Every variant is a step of 32 layers and the head in one CUDA graph with overlapping launches, 256 tokens of context,
with other kernels than those in use, whose logits it is compared with; some leave parts out, to see what these cost.
`--limit` is how many seconds may pass; what is left then is not measured. The table comes last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decode_step import NUM_LAYERS, DecodeStep, Layer, random_weight
from benchmarks.kernel_cases import EPS, HIDDEN, INNER, QKV, SCORING, VOCAB, distance
from benchmarks.kernels import replay_seconds
from benchmarks.pair_linear import pair_linear
from benchmarks.small_batch_kernels import Stream, chained_linear
from legato.kernels import norm as norms
from legato.kernels import overlap
from legato.kernels.attention.configs import DecodeConfig
from legato.kernels.attention.turned import _turned_triton
from legato.kernels.few_linear import FewConfig, few_linear
from legato.kernels.norm import add_rms_norm, rms_norm
from legato.kernels.paged_kv import PagedKV
from legato.kernels.sample import greedy_sample
from legato.kernels.small_linear import LinearConfig, small_linear

ROWS = (2, 4, 8, 1, 16)
Product = Callable[..., Tensor]
PRODUCTS = {"qkv": (QKV, HIDDEN), "output": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}


@dataclass(frozen=True)
class Variant:
    name: str
    rows: tuple[int, ...] = (2, 4, 8, 16)
    chained: bool = False  # no launches for norms
    turned: bool = False  # rotary embedding in the attention
    prefetch: int = 0
    tiles: dict[str, FewConfig] = field(default_factory=dict)
    pairs: dict[str, LinearConfig] = field(default_factory=dict)
    attention: DecodeConfig | None = None
    norm_warps: int = 0
    cublas: bool = False
    leave_out: tuple[str, ...] = ()  # "attention", "norm"


class Step(DecodeStep):
    variant: Variant

    def product(self, name: str, x: Tensor, weight: Tensor, gated: bool = False) -> Tensor:
        variant = self.variant
        activation = "silu" if gated else None
        if variant.cublas and not gated:
            return F.linear(x, weight)
        if name in variant.pairs:
            return pair_linear(x, weight, variant.pairs[name], "silu" if gated else None)
        if name in variant.tiles:
            return few_linear(x, weight, None, variant.tiles[name], "silu" if gated else None)
        return small_linear(x, weight, activation=activation)  # type: ignore[arg-type]

    def attention(self, qkv: Tensor, kv: PagedKV, layer: Layer) -> Tensor:
        variant = self.variant
        if "attention" in variant.leave_out:
            return qkv[:, :HIDDEN]
        if not variant.turned:
            return self.attend(qkv, kv)
        return _turned_triton(qkv, self.positions, self.angles, kv, self.slots, SCORING, variant.attention)

    def normed(self, x: Tensor, total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return (x, total) if "norm" in self.variant.leave_out else add_rms_norm(x, total, weight, EPS, inplace=True)

    def forward(self) -> Tensor:
        return self.chain() if self.variant.chained else self.separate()

    def separate(self) -> Tensor:
        """As the engine does it."""
        x, total = torch.zeros_like(self.x), self.x.clone()
        for layer, kv in zip(self.layers, self.caches, strict=True):
            x, total = self.normed(x, total, layer.norms[0])
            x = self.product("output", self.attention(self.product("qkv", x, layer.qkv), kv, layer), layer.output)
            x, total = self.normed(x, total, layer.norms[1])
            x = self.product("down", self.product("gate_up", x, layer.gate_up, gated=True), layer.down)
        x, _ = add_rms_norm(x, total, self.norm, EPS, inplace=True)
        return self.finish(small_linear(x, self.head))

    def chain(self) -> Tensor:
        total = self.x.clone()
        x: Tensor | Stream = rms_norm(total, self.layers[0].norms[0], EPS)
        for i, (layer, kv) in enumerate(zip(self.layers, self.caches, strict=True)):
            qkv = self.link("qkv", x, layer.qkv, layer.norms[0] if i else None)
            assert isinstance(qkv, Tensor)
            stream = self.link("output", self.attention(qkv, kv, layer), layer.output, residual=total)
            gated = self.link("gate_up", stream, layer.gate_up, layer.norms[1], gated=True)
            x = self.link("down", gated, layer.down, residual=total)
        logits = self.link("head", x, self.head, self.norm)
        assert isinstance(logits, Tensor)
        return self.finish(logits)

    def link(
        self,
        name: str,
        x: Tensor | Stream,
        weight: Tensor,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor | Stream:
        variant = self.variant
        config, prefetch = variant.tiles.get(name), 0 if name == "head" else variant.prefetch
        weight_and_eps = None if norm is None else (norm, EPS)
        return chained_linear(x, weight, weight_and_eps, residual, "silu" if gated else None, config, prefetch)

    def finish(self, logits: Tensor) -> Tensor:
        greedy_sample(logits)
        return logits


def tiles(**configs: tuple[int, int, int, int]) -> dict[str, FewConfig]:
    return {name: FewConfig(*config) for name, config in configs.items()}


def pairs(config: LinearConfig, down: LinearConfig) -> dict[str, LinearConfig]:
    return {name: down if name == "down" else config for name in PRODUCTS}


def variants() -> Iterator[Variant]:
    yield Variant("in use", (1, 2, 4, 8, 16))
    yield Variant("turned attention", (1, 2, 4, 8, 16), turned=True)
    yield Variant("chained", chained=True)
    yield Variant("chained, turned", chained=True, turned=True)
    for parts in (("attention",), ("norm",), ("attention", "norm")):
        yield Variant(f"without {' and '.join(parts)}", (1, 2, 8), leave_out=parts)
    for columns in (128, 256):
        yield Variant(f"chained, turned, prefetch {columns}", (2, 8), chained=True, turned=True, prefetch=columns)
    for shape in ((16, 64, 64, 4, 2), (120, 128, 64, 4, 2), (120, 256, 64, 4, 2), (120, 64, 64, 8, 2)):
        further, least, keys, warps, _ = shape
        name = f"turned, {further} further splits of {least} keys, {keys} at a time, {warps} warps"
        yield Variant(name, turned=True, attention=DecodeConfig(*shape))
    yield Variant("turned, 128 keys, 8 warps", (2, 8), turned=True, attention=DecodeConfig(120, 128, 128, 8, 2))
    for names in (("gate_up",), ("down",), ("qkv", "output"), ("qkv", "output", "down")):
        some = {name: LinearConfig(4, 1024, 4) for name in names}
        yield Variant(f"turned, pairs for {' and '.join(names)}", (2,), turned=True, pairs=some)
    for warps in (4, 8, 16):
        yield Variant(f"turned, norm of {warps} warps", (1, 2, 4, 8), turned=True, norm_warps=warps)
    for shape in ((2, 1024, 4), (4, 1024, 4), (4, 512, 2), (2, 2048, 8), (8, 512, 4)):
        tile_rows, block_k, num_warps = shape
        config = LinearConfig(*shape)
        down = LinearConfig(tile_rows, min(block_k, 1024), num_warps)
        yield Variant(
            f"pairs {tile_rows} x {block_k}, {num_warps} warps", (2, 4), turned=True, pairs=pairs(config, down)
        )
    for name, config in {
        "gate_up split 2": tiles(gate_up=(32, 128, 2, 2)),
        "gate_up split 4": tiles(gate_up=(32, 128, 2, 4)),
        "gate_up 16 x 256, 1 warp": tiles(gate_up=(16, 256, 1, 1)),
        "gate_up 64 rows, 4 warps, split 2": tiles(gate_up=(64, 128, 4, 2)),
        "down split 16": tiles(down=(32, 128, 2, 16)),
        "down split 4": tiles(down=(32, 128, 2, 4)),
        "output split 4": tiles(output=(32, 128, 2, 4)),
        "output 16 rows, 1 warp, split 4": tiles(output=(16, 128, 1, 4)),
        "qkv split 2": tiles(qkv=(32, 128, 2, 2)),
        "qkv 16 rows, 1 warp, split 2": tiles(qkv=(16, 128, 1, 2)),
        "16 rows, 1 warp": tiles(
            qkv=(16, 128, 1, 2), output=(16, 128, 1, 4), gate_up=(16, 128, 1, 1), down=(16, 128, 1, 4)
        ),
    }.items():
        yield Variant(f"chained, turned, {name}", (8,), chained=True, turned=True, tiles=config)
    yield Variant("cuBLAS, turned", (8, 16), cublas=True, turned=True)


def graph_milliseconds(step: Step) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.forward()
    graph.replay()
    return 1e3 * statistics.median(replay_seconds(graph) for _ in range(30))


def measure(step: Step, variant: Variant, expected: Tensor | None) -> tuple[float, float, Tensor]:
    """Milliseconds, distance of the logits from `expected`, and the logits. NaN if they change between two runs."""
    step.variant = variant
    usual = norms._num_warps
    if variant.norm_warps:
        norms._num_warps = lambda block, num_rows: variant.norm_warps
    try:
        logits = step.forward().clone()
        same = all(torch.equal(logits, step.forward()) for _ in range(3))
        error = 0.0 if expected is None else distance(logits, expected.double())
        return graph_milliseconds(step), error if same else float("nan"), logits
    finally:
        norms._num_warps = usual


def random_layers() -> list[Layer]:
    weights = partial(map, lambda shape: random_weight(*shape), PRODUCTS.values())
    ones = torch.ones(2, HIDDEN, dtype=torch.bfloat16, device="cuda")
    return [Layer(*weights(), ones) for _ in range(NUM_LAYERS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=150.0)
    parser.add_argument("--only", default="", help="variants whose name contains this, besides those in use")
    options = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    layers, head = random_layers(), random_weight(VOCAB, HIDDEN)
    steps = {rows: Step(layers, head, rows, 256) for rows in ROWS}
    overlap.OVERLAP_LAUNCHES = True
    expected: dict[int, Tensor] = {}
    table: dict[str, dict[int, str]] = {}
    for variant in (each for each in variants() if each.name == "in use" or options.only in each.name):
        for rows in variant.rows:
            if time.monotonic() - began > options.limit:
                continue
            try:
                milliseconds, error, logits = measure(steps[rows], variant, expected.get(rows))
            except Exception as refused:
                print(f"{variant.name}, {rows} rows: {type(refused).__name__}: {str(refused)[:200]}", flush=True)
                continue
            expected.setdefault(rows, logits)
            table.setdefault(variant.name, {})[rows] = f"{milliseconds:.3f} ({error:.0e})"
            print(f"{time.monotonic() - began:5.0f} s  {variant.name}, {rows} rows: {milliseconds:.3f} ms", flush=True)
    print(f"\n{'ms (distance of logits)':44}" + "".join(f"{rows:>16}" for rows in sorted(ROWS)))
    for name, times in table.items():
        print(f"{name:44}" + "".join(f"{times.get(rows, ''):>16}" for rows in sorted(ROWS)))


if __name__ == "__main__":
    main()
