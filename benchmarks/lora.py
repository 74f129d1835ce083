"""What LoRA adapters cost: throughput of many streams with many adapters against none, and the gap of a load.

    python -m benchmarks.lora --model llama-8b --streams 256 --adapters 64 --out benchmarks/results/lora.json

Starts one shard without adapters and then one with, both with random weights, and drives them with the router's
scheduler, without HTTP and text. Adapters have random matrices for every linear layer, of ranks from 8 to 64. Passes:

    base            all streams, in the shard that takes no adapters
    no-adapter      the same in the shard that has them: nobody asks for one
    mixed           every stream with one of the adapters
    half            every other stream
    calm            as no-adapter, with longer answers
    load            the same, and meanwhile an adapter of some 100 MB is loaded, again and again

At last, of a small model in float32: 10,000 mixed requests, whose tokens are compared with those of transformers' model
with the adapters merged into its weights (`benchmarks/lora_tokens.py`).
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.adapters import AdapterShard, Answers, opened, shapes_of, write_adapter
from benchmarks.lora_tokens import compare_tokens
from legato.benchmark.report import environment
from legato.modelfiles.shapes import SHAPES
from legato.scheduling.state import GenerationRequest
from legato.telemetry.metrics import StepFigures

RANKS = (8, 16, 32, 64)
# Files of adapters, which several names share: what is in them does not matter, and disks are small.
NUM_FILES = 8
LOADED_BYTES = 100_000_000
KINDS = ("base", "no-adapter", "mixed", "half")
# What must be shown.
GOALS = {"mixed": 0.85, "no-adapter": 0.99, "load_seconds": 1.0, "gap_p99_moved_by_load": 0.05}


@dataclass
class Gaps:
    """When results came, and whether they were of decodes alone: prompts come first, and their steps are long."""

    results: list[tuple[float, bool]] = field(default_factory=list)

    def note(self, step: StepFigures) -> None:
        self.results.append((time.perf_counter(), step.method == "decode"))

    def figures(self, started: float, num_tokens: int) -> dict[str, float]:
        pairs = itertools.pairwise(self.results)
        gaps = sorted(after - before for (before, _), (after, is_decode) in pairs if is_decode)
        seconds = self.results[-1][0] - started
        return {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(num_tokens / seconds, 1),
            "gap_p50_ms": round(statistics.median(gaps) * 1e3, 3),
            "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 3),
            "gap_max_ms": round(gaps[-1] * 1e3, 3),
        }


class Bench:
    def __init__(self, shard: AdapterShard, args: Any) -> None:
        self._shard = shard
        self._args = args

    async def run(self, numbers: Sequence[int], num_tokens: int) -> dict[str, float]:
        """`numbers` are the adapters of the streams, in turn; 0: none."""
        args, rng, gaps = self._args, random.Random(0), Gaps()
        requests = [
            GenerationRequest(
                next(self._shard.request_ids),
                [rng.randrange(10, 500) for _ in range(args.prompt)],
                num_tokens,
                ignore_eos=True,
                adapter=numbers[index % len(numbers)],
            )
            for index in range(args.streams)
        ]
        answers = Answers({request.id: [] for request in requests})
        self._shard.on_step = gaps.note
        started = time.perf_counter()
        for request in requests:
            self._shard.loop.submit(request, answers)  # type: ignore[arg-type]
        await answers.done
        self._shard.on_step = lambda step: None
        return gaps.figures(started, args.streams * num_tokens)

    async def passes(self, *kinds: str) -> dict[str, dict[str, float]]:
        numbers, num_tokens = [adapter.number for adapter in self._shard.adapters], self._args.tokens
        ways = {
            "base": [0],
            "no-adapter": [0],
            "mixed": numbers,
            "half": [number for each in numbers for number in (each, 0)],
        }
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for kind in kinds:
            await self.run(ways[kind], num_tokens)  # warm: adapters are on the device, sizes are captured
        for _ in range(self._args.rounds):
            for kind in kinds:
                found[kind].append(await self.run(ways[kind], num_tokens))
        return {kind: _median(runs) for kind, runs in found.items()}

    async def load(self, path: Path) -> dict[str, dict[str, float]]:
        """Gaps of streams while nothing else happens, and while an adapter is loaded and unloaded all the time."""
        seconds: list[float] = []
        has_loaded = asyncio.Event()
        shards, num_tokens = self._shard.shards, self._args.load_tokens
        await self.run([0], num_tokens)  # warm
        calm = await self.run([0], num_tokens)

        async def again_and_again() -> None:
            while True:
                started = time.perf_counter()
                await shards.load_adapter("loaded-meanwhile", str(path))
                seconds.append(time.perf_counter() - started)
                has_loaded.set()
                await shards.unload_adapter("loaded-meanwhile")
                await asyncio.sleep(0.2)

        loading = asyncio.create_task(again_and_again())
        try:
            figures = await self.run([0], num_tokens)
            waiting = asyncio.create_task(has_loaded.wait())  # a tiny model is done before
            await asyncio.wait([loading, waiting], return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()  # why it failed
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        slow = {"loads": len(seconds), "load_seconds": round(statistics.median(seconds), 3)}
        return {"calm": calm, "load": {**figures, **slow, "load_seconds_max": round(max(seconds), 3)}}


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


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
    if "base" in args.kinds:
        async with opened(args.model, args.streams, args.shard, args.capture_seconds) as shard:
            results |= await Bench(shard, args).passes("base")
    with_adapters = [f"--lora-adapters={names}", f"--lora-device-ranks={device_ranks}", "--lora-allow-runtime"]
    with_adapters.append(f"--lora-max-rank={max(*ranks, loaded_rank)}")
    with_adapters += [f"--lora-target-modules={','.join(args.modules)}"] if args.modules else []
    kinds = [kind for kind in args.kinds if kind != "base"]
    async with opened(args.model, args.streams, [*with_adapters, *args.shard], args.capture_seconds) as shard:
        bench = Bench(shard, args)
        results |= await bench.passes(*kinds)
        results |= await bench.load(loaded) if args.load_tokens else {}
    first = args.kinds[0]
    shares = {
        kind: round(results[kind]["tokens_per_second"] / results[first]["tokens_per_second"], 4) for kind in kinds
    }
    figures: dict[str, Any] = {f"share_of_{first}": shares}
    if args.load_tokens:
        moved = results["load"]["gap_p99_ms"] / results["calm"]["gap_p99_ms"] - 1
        figures["gap_p99_moved_by_load"] = round(moved, 4)
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
        **figures,
        "goals": GOALS,
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
    parser.add_argument("--load-tokens", type=int, default=768, help="of each answer beside loads; 0: no loads")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="what the others are compared with first"
    )
    parser.add_argument("--capture-seconds", type=float, default=45, help="for CUDA graphs before the first pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--token-requests", type=int, default=10_000, help="whose tokens are compared; 0: none")
    parser.add_argument("--loaded-bytes", type=int, default=LOADED_BYTES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("shard", nargs="*", help="more arguments of the shard, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="legato-lora-") as folder:
        results = asyncio.run(measure(args, Path(folder)))
        if args.token_requests:
            print({name: value for name, value in results.items() if name.startswith("share_of")}, flush=True)
            results["tokens"] = asyncio.run(compare_tokens(Path(folder), args.token_requests))
    text = json.dumps({**environment(), **results}, indent=1)
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
