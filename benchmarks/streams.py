"""What concurrency is worth to clients: tokens per second of N streams one after the other, and of N at once.

    text-generation-launcher &
    python -m benchmarks.streams --out benchmarks/results/streams.json

Every request has a prompt of its own, so that no run profits from the prefix cache of another, and never ends early.
Sockets are read raw: on a small machine a client library would take the server's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from legato.benchmark.report import environment

WORDS = ("river", "stone", "lantern", "winter", "orchard", "violin", "copper", "harbour", "meadow", "thunder", "candle")
READ_SIZE = 1 << 16
# In the text of a token a line break is escaped, so this is always the beginning of an event.
EVENT = b"\ndata:"


@dataclass(frozen=True)
class Work:
    host: str
    port: int
    streams: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Streamed:
    """One stream as its client saw it."""

    num_tokens: int
    first_token: float  # seconds from sending the request


@dataclass(frozen=True)
class Pass:
    """All streams once."""

    seconds: float
    tokens_per_second: float
    first_token_p50: float


async def stream(work: Work, prompt: str) -> Streamed:
    parameters = {"max_new_tokens": work.new_tokens, "ignore_eos": True, "truncate": work.prompt_tokens}
    body = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
    head = f"POST /generate_stream HTTP/1.1\r\nHost: {work.host}\r\nConnection: close\r\n"
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(work.host, work.port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    received, first_token = b"", 0.0
    while chunk := await reader.read(READ_SIZE):
        received += chunk
        if not first_token and EVENT in received:
            first_token = time.perf_counter() - started
    writer.close()
    num_tokens = received.count(EVENT)
    if num_tokens != work.new_tokens:
        raise SystemExit(
            f"{num_tokens} events instead of {work.new_tokens}: {received[-300:].decode(errors='replace')}"
        )
    return Streamed(num_tokens, first_token)


async def one_after_the_other(work: Work, prompts: Iterator[str]) -> list[Streamed]:
    return [await stream(work, next(prompts)) for _ in range(work.streams)]


async def at_once(work: Work, prompts: Iterator[str]) -> list[Streamed]:
    return await asyncio.gather(*(stream(work, next(prompts)) for _ in range(work.streams)))


async def measure(run: Callable[[], Coroutine[None, None, list[Streamed]]]) -> Pass:
    started = time.perf_counter()
    streams = await run()
    seconds = time.perf_counter() - started
    num_tokens = sum(each.num_tokens for each in streams)
    return Pass(seconds, num_tokens / seconds, statistics.median(each.first_token for each in streams))


def prompts(length: int) -> Iterator[str]:
    """Different from the first word on. Long enough: the server cuts them to the tokens wanted."""
    rng = random.Random(0)
    while True:
        yield " ".join(rng.choice(WORDS) for _ in range(2 * length))


async def compare(work: Work, repeat: int) -> dict[str, Any]:
    """The two ways in turns, so that whatever else the machine does hits both; the fastest run of each counts."""
    texts = prompts(work.prompt_tokens)
    await stream(work, next(texts))
    sequential, concurrent = [], []
    for _ in range(repeat):
        sequential.append(await measure(lambda: one_after_the_other(work, texts)))
        concurrent.append(await measure(lambda: at_once(work, texts)))
    best = [max(runs, key=lambda run: run.tokens_per_second) for runs in (sequential, concurrent)]
    return {
        "ratio": best[1].tokens_per_second / best[0].tokens_per_second,
        "sequential": asdict(best[0]),
        "concurrent": asdict(best[1]),
        "runs": {"sequential": [*map(asdict, sequential)], "concurrent": [*map(asdict, concurrent)]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Concurrent streams against sequential ones, over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="where the server listens")
    parser.add_argument("--port", type=int, default=3000, help="where the server listens")
    parser.add_argument("--streams", type=int, default=16, help="requests, one after the other and at once")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate for each")
    parser.add_argument("--repeat", type=int, default=1, help="how often; the fastest run counts")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    work = Work(options.host, options.port, options.streams, options.prompt_tokens, options.new_tokens)
    try:
        figures = asyncio.run(compare(work, options.repeat))
    except OSError as error:
        sys.exit(f"--host {work.host} --port {work.port}: {error.strerror or error}")
    for name in ("sequential", "concurrent"):
        rate, first_token = figures[name]["tokens_per_second"], figures[name]["first_token_p50"]
        print(f"{work.streams} {name}: {rate:.1f} tokens/s, first token after {first_token:.3f} s")
    print(f"ratio: {figures['ratio']:.2f}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**environment(), "work": asdict(work), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
