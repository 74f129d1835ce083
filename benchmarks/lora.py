"""What LoRA adapters cost: throughput of many streams with many adapters against none, and the gap of a load.

    python -m benchmarks.lora --model llama-8b --streams 256 --adapters 64 --out benchmarks/results/lora.json

Starts one shard without adapters and then one with, both with random weights, and drives them with the router's
scheduler, without HTTP and text. Adapters have random matrices for every linear layer, of ranks from 8 to 64. Passes:

    base            all streams, in the shard that takes no adapters
    no-adapter      the same in the shard that has them: nobody asks for one
    mixed           every stream with one of the adapters
    half            every other stream
    load            as no-adapter, and meanwhile an adapter of some 100 MB is loaded, again and again
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from legato.benchmark.engine.session import connect
from legato.benchmark.report import environment
from legato.benchmark.shard import spawned
from legato.common.gc import freeze_gc
from legato.common.options import RouterOptions
from legato.modelfiles.shapes import SHAPES
from legato.router.cli import warm_up
from legato.router.shards import GrpcShards
from legato.router.step_loop import StepLoop
from legato.scheduling.adapters import AdapterInfo
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, Output
from legato.telemetry.metrics import StepFigures

RANKS = (8, 16, 32, 64)
# Files of adapters, which several names share: what is in them does not matter, and disks are small.
NUM_FILES = 8
LOADED_BYTES = 100_000_000


def shapes_of(config: dict[str, Any], modules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The linear layers of a Llama, or those with these last names: (outputs, inputs)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    count = range(config["num_hidden_layers"])
    chosen = {name: shape for name, shape in layer.items() if not modules or name.rpartition(".")[2] in modules}
    return {f"model.layers.{i}.{name}": shape for i in count for name, shape in chosen.items()}


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs).mul_(0.01).bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank).mul_(0.01).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Pass:
    """One run of all streams: when results came, and how many tokens."""

    num_left: int
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    results: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def put(self, request_id: int, output: Output) -> None:
        self.num_tokens += 1
        if output.error is not None and not self.done.done():
            self.done.set_exception(RuntimeError(output.error))
        if output.finish_reason is not None:
            self.num_left -= 1
            if self.num_left == 0:
                self.done.set_result(None)

    def trace(self, request_id: int, chunk: object) -> None:
        raise AssertionError("nothing is traced here")

    def figures(self, started: float) -> dict[str, float]:
        """Decode steps alone decide the gaps: prompts come first."""
        gaps = sorted(after - before for before, after in itertools.pairwise(self.results))
        seconds = self.results[-1] - started
        return {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(self.num_tokens / seconds, 1),
            "gap_p50_ms": round(statistics.median(gaps) * 1e3, 3),
            "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 3),
            "gap_max_ms": round(gaps[-1] * 1e3, 3),
        }


class Bench:
    def __init__(self, loop: StepLoop, shards: GrpcShards, adapters: Sequence[AdapterInfo], args: Any) -> None:
        self._loop = loop
        self._shards = shards
        self._adapters = adapters
        self._args = args
        self._ids = itertools.count(1)
        self._current: Pass | None = None

    def note(self, step: StepFigures) -> None:
        if self._current is not None:
            self._current.results.append(time.perf_counter())

    async def run(self, numbers: Sequence[int]) -> dict[str, float]:
        """`numbers` are the adapters of the streams, in turn; 0: none."""
        args, rng = self._args, random.Random(0)
        current = self._current = Pass(args.streams)
        started = time.perf_counter()
        for index in range(args.streams):
            prompt = [rng.randrange(10, 500) for _ in range(args.prompt)]
            adapter = numbers[index % len(numbers)]
            request = GenerationRequest(next(self._ids), prompt, args.tokens, ignore_eos=True, adapter=adapter)
            self._loop.submit(request, current)  # type: ignore[arg-type]
        await current.done
        self._current = None
        return current.figures(started)

    async def passes(self, *kinds: str) -> dict[str, dict[str, float]]:
        numbers = [adapter.number for adapter in self._adapters]
        ways = {
            "base": [0],
            "no-adapter": [0],
            "mixed": numbers,
            "half": [number for each in numbers for number in (each, 0)],
        }
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for kind in kinds:
            await self.run(ways[kind])  # warm: adapters are on the device, sizes are captured
        for _ in range(self._args.rounds):
            for kind in kinds:
                found[kind].append(await self.run(ways[kind]))
        return {kind: _median(runs) for kind, runs in found.items()}

    async def load(self, path: Path) -> dict[str, float]:
        """Gaps of streams while an adapter is loaded and unloaded all the time."""
        seconds: list[float] = []
        has_loaded = asyncio.Event()

        async def again_and_again() -> None:
            while True:
                started = time.perf_counter()
                await self._shards.load_adapter("loaded-meanwhile", str(path))
                seconds.append(time.perf_counter() - started)
                has_loaded.set()
                await self._shards.unload_adapter("loaded-meanwhile")
                await asyncio.sleep(0.2)

        loading = asyncio.create_task(again_and_again())
        try:
            figures = await self.run([0])
            waiting = asyncio.create_task(has_loaded.wait())  # a tiny model is done before
            await asyncio.wait([loading, waiting], return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()  # why it failed
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        return {**figures, "loads": len(seconds), "load_seconds": round(statistics.median(seconds), 3)}


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


@asynccontextmanager
async def opened(args: Any, arguments: Sequence[str]) -> AsyncIterator[Bench]:
    with spawned(args.model, [*arguments, *args.shard]) as process:
        shards, info = await connect(process)
        options = RouterOptions(max_concurrent_requests=max(args.streams, 64), max_batch_size=args.streams)
        warmed, limits = await warm_up(shards, info, options)
        scheduler = Scheduler(replace(warmed.limits, prefix_caching=False, max_requests=None))
        adapters = [
            AdapterInfo(number, each.adapter_id, each.num_pages) for number, each in enumerate(info.adapters, 1)
        ]
        for adapter in adapters:
            scheduler.adapters.add(adapter)
        benches: list[Bench] = []
        loop = StepLoop(scheduler, shards, limits, lambda step: benches[0].note(step))
        benches.append(Bench(loop, shards, adapters, args))
        steps = asyncio.ensure_future(loop.run())
        await asyncio.sleep(0.5)
        freeze_gc()
        try:
            yield benches[0]
        finally:
            steps.cancel()
            await asyncio.gather(steps, return_exceptions=True)
            await shards.close()


async def measure(args: Any, folder: Path) -> dict[str, Any]:
    config = SHAPES[args.model] if args.model in SHAPES else json.loads((Path(args.model) / "config.json").read_text())
    shapes = shapes_of(config, args.modules)
    ranks = [args.ranks[i % NUM_FILES % len(args.ranks)] for i in range(args.adapters)]
    files = {}
    for number in range(min(NUM_FILES, args.adapters)):
        files[number] = write_adapter(folder / f"f{number}", shapes, ranks[number])
    size = sum(sum(shape) for shape in shapes.values()) * 2
    loaded_rank = min(256, max(1, round(args.loaded_bytes / size)))
    loaded = write_adapter(folder / "loaded", shapes, loaded_rank)
    names = ",".join(f"a{i}={files[i % len(files)]}" for i in range(args.adapters))
    device_ranks = max(sum(-(-rank // 8) * 8 for rank in ranks), -(-loaded_rank // 8) * 8)
    results: dict[str, Any] = {}
    async with opened(args, []) as bench:
        results |= await bench.passes("base")
    with_adapters = [f"--lora-adapters={names}", f"--lora-device-ranks={device_ranks}", "--lora-allow-runtime"]
    with_adapters.append(f"--lora-max-rank={max(*ranks, loaded_rank)}")
    with_adapters += [f"--lora-target-modules={','.join(args.modules)}"] if args.modules else []
    async with opened(args, with_adapters) as bench:
        results |= await bench.passes("no-adapter", "mixed", "half")
        results["load"] = await bench.load(loaded)
    base = results["base"]["tokens_per_second"]
    shares = {kind: round(results[kind]["tokens_per_second"] / base, 4) for kind in ("no-adapter", "mixed", "half")}
    moved = results["load"]["gap_p99_ms"] / results["no-adapter"]["gap_p99_ms"] - 1
    return {
        "model": args.model,
        "streams": args.streams,
        "adapters": args.adapters,
        "ranks": sorted(set(ranks)),
        "modules": args.modules or "all linear layers",
        # What a step that uses all of them has to read, besides the base model's weights.
        "adapter_bytes": sum(ranks) * size,
        "loaded_bytes": (loaded / "adapter_model.safetensors").stat().st_size,
        "passes": results,
        "share_of_base": shares,
        "gap_p99_moved_by_load": round(moved, 4),
        "environment": environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", help=f"one of {', '.join(SHAPES)}, or the folder of a Llama")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")], default=list(RANKS))
    parser.add_argument(
        "--modules", type=lambda text: text.split(","), default=[], help="that adapters change; all linear ones"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loaded-bytes", type=int, default=LOADED_BYTES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("shard", nargs="*", help="more arguments of the shard, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="legato-lora-") as folder:
        results = asyncio.run(measure(args, Path(folder)))
    text = json.dumps(results, indent=2)
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
