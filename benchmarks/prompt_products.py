"""Times the products of steps with prompts at the 8B shape: `python -m benchmarks.prompt_products --limit 150`.

Every variant first computes rows that are compared with float32. Times are of CUDA graphs over several weights,
replayed for a third of a second, so that the card runs at the clocks that long work leaves it; the first variant is
timed again at the end of each product. `--limit` is how many seconds may pass; what is left then is not measured. The
table comes last, in TFLOP/s, and for gate and up with the time of the activation in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decode_step import random_weight
from benchmarks.kernel_cases import HIDDEN, INNER, QKV, distance
from benchmarks.kernels import replay_seconds
from legato.kernels import overlap
from legato.kernels.activation import gate_and_mul
from legato.kernels.gated_linear import gated_linear

PRODUCTS = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "qkv": (QKV, HIDDEN), "output": (HIDDEN, HIDDEN)}
TOKENS = (1100, 8192, 2048, 1152, 1024, 1536, 4096)
SECONDS = 0.3

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    name: str
    product: Product
    library: str = "default"


def variants(name: str) -> Iterator[Variant]:
    if name != "gate_up":
        yield Variant("cuBLAS", F.linear)
        yield Variant("cuBLASLt", F.linear, "cublaslt")
        return
    yield Variant("cuBLAS", lambda x, weight: gate_and_mul(F.linear(x, weight), "silu"))
    yield Variant("cuBLASLt", lambda x, weight: gate_and_mul(F.linear(x, weight), "silu"), "cublaslt")
    yield Variant("gated_linear", lambda x, weight: gated_linear(x, weight, "silu"))


def seconds_of(variant: Variant, x: Tensor, weights: list[Tensor]) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            variant.product(x, weight)
    replay_seconds(graph)
    once = replay_seconds(graph)
    times = [replay_seconds(graph) for _ in range(max(3, int(SECONDS / once)))]
    return statistics.median(times) / len(weights)


def error_of(variant: Variant, name: str, x: Tensor, weight: Tensor) -> float:
    """Of the first and the last rows, from float32; NaN if two runs differ."""
    rows = torch.cat((torch.arange(64), torch.arange(x.shape[0] - 64, x.shape[0]))).to(x.device)
    expected = F.linear(x[rows].float(), weight.float())
    if name == "gate_up":
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    out = variant.product(x, weight)
    same = torch.equal(out, variant.product(x, weight))
    return distance(out[rows], expected.double()) if same and bool(out.isfinite().all()) else float("nan")


def measure(name: str, tokens: int, deadline: float) -> dict[str, str]:
    out_features, in_features = PRODUCTS[name]
    weights = [random_weight(out_features, in_features) for _ in range(4)]
    x = torch.randn(tokens, in_features, device="cuda").to(torch.bfloat16)
    flops = 2 * tokens * out_features * in_features
    found: dict[str, str] = {}
    tried = list(variants(name))
    for variant in [*tried, tried[0]]:
        if time.monotonic() > deadline:
            break
        torch.backends.cuda.preferred_blas_library(variant.library)
        try:
            error = error_of(variant, name, x, weights[0])
            seconds = seconds_of(variant, x, weights)
        except Exception as refused:
            print(f"{name}, {tokens}, {variant.name}: {type(refused).__name__}: {str(refused)[:300]}", flush=True)
            continue
        finally:
            torch.backends.cuda.preferred_blas_library("default")
        key = variant.name if variant.name not in found else f"{variant.name} again"
        found[key] = f"{flops / seconds / 1e12:.0f}"
        print(f"{name}, {tokens}, {key}: {1e6 * seconds:.1f} µs, {found[key]} TFLOP/s, error {error:.1e}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=150.0)
    given = parser.parse_args()
    deadline = time.monotonic() + given.limit
    torch.manual_seed(0)
    overlap.OVERLAP_LAUNCHES = True
    table = {(name, tokens): measure(name, tokens, deadline) for tokens in TOKENS for name in PRODUCTS}
    names = dict.fromkeys(name for found in table.values() for name in found)
    print(f"\n{'TFLOP/s':36}" + "".join(f"{f'{name} {tokens}':>14}" for name, tokens in table))
    for name in names:
        print(f"{name:36}" + "".join(f"{found.get(name, ''):>14}" for found in table.values()))


if __name__ == "__main__":
    main()
