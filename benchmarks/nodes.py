"""A model on two machines, which are network namespaces on this one: the same tokens as one process, and how fast.

    python -m benchmarks.nodes                        # as root, with `ip`
    python -m benchmarks.nodes --layout "PP 2"        # one of them; what the file has of the others stays

Every layout (tensor parallelism over the link, pipeline stages, both) runs with the link as it is and with delay and
loss. It fails if a stream has other tokens than one process gives. In float32, because with `--packed` weights shards
that share a product round otherwise than one process, on one machine, too; pipeline stages do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.machines import ClusterServer, Namespaces, cluster, missing_for_namespaces
from benchmarks.processes import launched as launched_alone
from benchmarks.processes import leave_nothing_behind
from legato.benchmark.report import environment, write_json
from legato.benchmark.shard import WITHOUT_DRAFTS

LAYOUTS = {
    "TP 2": ("--num-shard=1",),
    "PP 2": ("--num-shard=1", "--pipeline-parallel-size=2"),
    "TP 2 x PP 2": ("--num-shard=2", "--pipeline-parallel-size=2"),
}
# Seconds of delay each way, and the share of packets that is lost.
LINKS = {"fast": (0.0, 0.0), "5 ms, 1 % lost": (0.005, 0.01)}
RESULT = Path(__file__).parent / "results" / "nodes.json"
SUBJECTS = ("the sea", "a clock", "bread", "the moon", "a lost key", "winter", "an old road", "the first machine")


@dataclass
class Stream:
    """What a client has got."""

    tokens: list[int] = field(default_factory=list)
    error: str | None = None  # the type of the error event, or the status
    is_complete: bool = False


def prompts(count: int) -> list[str]:
    return [f"Write about {SUBJECTS[number % len(SUBJECTS)]}, part {number + 1}:" for number in range(count)]


async def generate(session: aiohttp.ClientSession, url: str, prompt: str, num_tokens: int) -> Stream:
    stream = Stream()
    parameters = {"max_new_tokens": num_tokens, "ignore_eos": True, "details": True}
    try:
        body = {"inputs": prompt, "parameters": parameters}
        async with session.post(f"{url}/generate_stream", json=body) as answer:
            if answer.status != 200:
                stream.error = f"status {answer.status}"
                return stream
            async for line in answer.content:
                if line.startswith(b"data:"):
                    _take(stream, json.loads(line[5:]))
    except (aiohttp.ClientError, TimeoutError) as error:
        stream.error = stream.error or f"connection: {type(error).__name__}"
    return stream


def _take(stream: Stream, event: dict[str, Any]) -> None:
    if "error_type" in event:
        stream.error = str(event["error_type"])
    elif event.get("token") is not None:
        stream.tokens.append(event["token"]["id"])
        stream.is_complete = event.get("generated_text") is not None


async def load(url: str, texts: list[str], num_tokens: int) -> tuple[list[Stream], float]:
    """All at once. Returns the streams and the seconds of all of them."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        streams = await asyncio.gather(*(generate(session, url, text, num_tokens) for text in texts))
        return list(streams), time.perf_counter() - started


def expected_tokens(words: list[str], texts: list[str], num_tokens: int) -> tuple[list[list[int]], float]:
    """Of one process on this machine, and the seconds it takes."""
    with launched_alone("--num-shard=1", "--prometheus-port=0", "--http-workers=1", *words) as (port, _):
        url = f"http://127.0.0.1:{port}"
        asyncio.run(load(url, texts[:1], 4))
        streams, seconds = asyncio.run(load(url, texts, num_tokens))
    assert all(stream.is_complete for stream in streams), [stream.error for stream in streams]
    return [stream.tokens for stream in streams], seconds


def measure(server: ClusterServer, texts: list[str], num_tokens: int, expected: list[list[int]]) -> dict[str, Any]:
    asyncio.run(load(server.url, texts[:1], 4))
    streams, seconds = asyncio.run(load(server.url, texts, num_tokens))
    equal = sum(stream.tokens == tokens for stream, tokens in zip(streams, expected, strict=True))
    return {
        "equal": equal,
        "streams": len(texts),
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(len(stream.tokens) for stream in streams) / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS))
    parser.add_argument("--model-id")
    parser.add_argument("--packed", action="store_true", help="weights as a CPU has them by default, not float32")
    options = parser.parse_args()
    if (missing := missing_for_namespaces()) is not None:
        sys.exit(f"error: {missing}")
    leave_nothing_behind()
    words = [f"--model-id={options.model_id}"] if options.model_id else []
    words += [] if options.packed else ["--dtype=float32"]
    words.append(WITHOUT_DRAFTS)  # stages have none
    texts = prompts(options.streams)
    expected, seconds = expected_tokens(words, texts, options.tokens)
    rate = round(options.streams * options.tokens / seconds, 1)
    print(f"one process: {rate} tokens per second")
    results: dict[str, Any] = {}
    for layout in options.layout or LAYOUTS:
        for link, (delay, loss) in LINKS.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                Namespaces(delay=delay, loss=loss) as network,
                cluster(network.machines, Path(folder), *words, *LAYOUTS[layout]) as server,
            ):
                found = results.setdefault(layout, {})[link] = measure(server, texts, options.tokens, expected)
                print(f"{layout}, link {link}: {json.dumps(found)}", flush=True)
    runs = json.loads(options.out.read_text()) if options.out.exists() else {}
    for layout, links in results.items():
        sizes = {"streams": options.streams, "tokens": options.tokens, "options": words}
        name = f"{layout}, packed" if options.packed else layout
        runs[name] = {**environment(), **sizes, "one process": {"tokens_per_second": rate}, **links}
    write_json(options.out, runs)
    figures = [figure for links in results.values() for figure in links.values() if isinstance(figure, dict)]
    if any(figure["equal"] < figure["streams"] for figure in figures):
        sys.exit("error: tokens differ from those of one process")


if __name__ == "__main__":
    main()
