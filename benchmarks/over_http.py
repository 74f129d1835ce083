"""What arrives over HTTP: tokens per second, time to the first token and gaps, at 1, 64, 256 and 512 streams.

    python -m benchmarks.over_http --load load.py --out benchmarks/results/http-llama-8b.json

Starts `text-generation-launcher` on a shape without weights, without drafts and else with its defaults, and drives it
with a closed-loop streaming load on /v1/completions: a program that takes --port, --concurrency, --procs, --requests
and --vocab and prints one line of JSON. Every run has prompts of its own (another --vocab), so that nothing is found in
the prefix cache; how much was found there is reported too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import launched
from legato.benchmark.report import environment, markdown, write_json
from legato.benchmark.shard import WITHOUT_DRAFTS
from legato.modelfiles.shapes import SHAPES, write_shape

# Streams, processes of the load, requests.
LEVELS = ((1, 1, 8), (64, 8, 256), (256, 8, 1024), (512, 8, 2048))
LONGEST = 4096
RUN_SECONDS = 180.0
HEADER = ("Run", "Streams", "Tok/s", "TTFT p50 ms", "p95", "Gap p50 ms", "p95", "p99")


@contextmanager
def serving(model: str) -> Iterator[int]:
    """The port of a server of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--model-id", str(write_shape(model, Path(folder) / model)), "--load-format", "dummy"]
        started = time.monotonic()
        with launched(*words, WITHOUT_DRAFTS, "--max-total-tokens", str(LONGEST)) as (port, _):
            print(f"up after {time.monotonic() - started:.1f} s", flush=True)
            yield port


def cached_tokens(port: int) -> float:
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    found = re.search(r"^legato_prefix_hit_tokens (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def run(load: Path, port: int, vocab: int, level: tuple[int, int, int]) -> dict[str, Any]:
    flags = dict(zip(("concurrency", "procs", "requests"), level, strict=True)) | {"port": port, "vocab": vocab}
    words = [f"--{name}={value}" for name, value in flags.items()]
    done = subprocess.run([sys.executable, str(load), *words], capture_output=True, text=True, timeout=RUN_SECONDS)
    if done.returncode:
        sys.exit(f"{load.name} {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return {"load": f"{load.name} {' '.join(words)}", **json.loads(done.stdout)}


def row(number: int, result: dict[str, Any]) -> list[str]:
    ttft, gap = result["ttft_ms"], result["gap_ms"]
    figures = (result["out_tok_s"], ttft["p50"], ttft["p95"], gap["p50"], gap["p95"], gap["p99"])
    return [str(number), str(result["concurrency"]), *("-" if each is None else f"{each:,.1f}" for each in figures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, help="the program that makes the load")
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--repeat", type=int, default=2, help="how often to go through all numbers of streams")
    parser.add_argument("--most", type=int, default=LEVELS[-1][0], help="leave out more streams than this")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    given = parser.parse_args()
    vocab, results, rows = int(SHAPES[given.model]["vocab_size"]), [], []
    with serving(given.model) as port:
        for number in range(1, given.repeat + 1):
            for level in (level for level in LEVELS if level[0] <= given.most):
                vocab = max(64, int(vocab * 0.7))
                results.append({"run": number, **run(given.load, port, vocab, level)})
                rows.append(row(number, results[-1]))
                print(*rows[-1], sep="\t", flush=True)
        cached = cached_tokens(port)
    print(markdown(HEADER, rows), f"\nPrompt tokens found in the prefix cache: {cached:.0f}", sep="\n")
    if given.out:
        report = {**environment(), "model": given.model, "speculate": 0, "cached_tokens": cached, "runs": results}
        write_json(given.out, report)


if __name__ == "__main__":
    main()
