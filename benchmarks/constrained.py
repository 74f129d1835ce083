"""What a grammar costs: tokens per second of N streams under one, against N free streams of the same length.

    python -m benchmarks.constrained --out benchmarks/results/constrained.json

Starts a server with the default model and without drafts, unless `--port` names one that is running. Free and
constrained passes take turns, each pair in the other order than the last, so that whatever else the machine does hits
both; the median of the pairs' ratios counts. No text ends before its length, and the JSON is near its limit all the
time, where it costs most.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import EVENT, READ_SIZE, generate_stream
from benchmarks.processes import HOST, launched
from legato.benchmark.report import environment, write_json
from legato.benchmark.shard import WITHOUT_DRAFTS

PROMPT_TOKENS = 64
WORDS = ("river", "stone", "lantern", "winter", "orchard", "violin", "copper", "harbour", "meadow", "thunder", "candle")
# Longer than the tokens that are asked for: a finished text has nothing to choose from and would cost less.
STORY = {
    "type": "object",
    "properties": {"title": {"type": "string", "minLength": 20}, "story": {"type": "string", "minLength": 120}},
    "required": ["title", "story"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"type": "json", "value": STORY},
    "regex": {"type": "regex", "value": "[a-zA-Z ,.]{400,600}"},
}


@dataclass(frozen=True)
class Work:
    port: int
    streams: int
    new_tokens: int
    pairs: int


def prompts(length: int) -> Iterator[str]:
    """Different from the first word on. Long enough: the server truncates them to the tokens wanted."""
    rng = random.Random(0)
    while True:
        yield " ".join(rng.choice(WORDS) for _ in range(2 * length))


async def stream(work: Work, prompt: str, grammar: dict[str, Any] | None) -> None:
    reader, writer = await asyncio.open_connection(HOST, work.port)
    writer.write(generate_stream(prompt, work.new_tokens, truncate=PROMPT_TOKENS, grammar=grammar, close=True))
    received = b""
    while chunk := await reader.read(READ_SIZE):
        received += chunk
    writer.close()
    if received.count(EVENT) != work.new_tokens:
        raise SystemExit(f"{received.count(EVENT)} events instead of {work.new_tokens}: {received[-300:]!r}")


async def tokens_per_second(work: Work, texts: Iterator[str], grammar: dict[str, Any] | None) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(stream(work, next(texts), grammar) for _ in range(work.streams)))
    return work.streams * work.new_tokens / (time.perf_counter() - started)


async def compare(work: Work, texts: Iterator[str], grammar: dict[str, Any]) -> dict[str, Any]:
    """The first pass of each kind is not counted: it compiles the grammar and fills caches."""
    for each in (None, grammar):
        await tokens_per_second(work, texts, each)
    free: list[float] = []
    constrained: list[float] = []
    for number in range(work.pairs):
        for is_free in (True, False) if number % 2 == 0 else (False, True):
            rate = await tokens_per_second(work, texts, None if is_free else grammar)
            (free if is_free else constrained).append(rate)
    ratios = [rate / other for rate, other in zip(constrained, free, strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "free": free, "constrained": constrained}


async def measure(work: Work) -> dict[str, Any]:
    texts = prompts(PROMPT_TOKENS)
    return {name: await compare(work, texts, grammar) for name, grammar in GRAMMARS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams under a grammar against free ones, over HTTP.")
    parser.add_argument("--port", type=int, help="of a server on this machine; without it one is started")
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate for each")
    parser.add_argument("--pairs", type=int, default=5, help="passes of each kind that count")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    with launched(WITHOUT_DRAFTS) if options.port is None else nullcontext((options.port, None)) as (port, _):
        work = Work(port, options.streams, options.new_tokens, options.pairs)
        figures = asyncio.run(measure(work))
    for name, each in figures.items():
        rates = (statistics.median(each[kind]) for kind in ("free", "constrained"))
        print("{}: {:.1f} tokens/s free, {:.1f} constrained, ratio {:.3f}".format(name, *rates, each["ratio"]))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        made = {"speculate": 0 if options.port is None else None, "work": asdict(work)}
        write_json(options.out, {**environment(), **made, **figures})


if __name__ == "__main__":
    main()
