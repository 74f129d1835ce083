"""What drafts bring on a device, without real weights: one shard and the router's scheduler, with and without drafts.

    python -m benchmarks.speculation_engine --out benchmarks/results/speculation-h200-llama-8b.json

One command, two minutes on an H200. HTTP and text are left out; `benchmarks/speculation.py` has both, and needs a real
model.

Random weights say nothing that a prompt could have in it. So the model is one that says a known text
(`benchmarks/copying.py`), and a prompt has as much of the answer as a request to edit code has:

    edits       300 tokens of "code" in the prompt. The answer repeats them in runs of 12 tokens on average, and between
                two runs it says one or two others (lengths are geometric: `--run`, `--change`). So a match is right for
                10 tokens and then there is none for 3, as with SmolLM2-135M-Instruct on HumanEval with the instruction
                of `benchmarks/speculation.py`: right for 9.8 tokens, none or a wrong one for 2.9.
    new         the answer has nothing of the prompt, and repeats nothing

Everything else is what a server does: suffix matches, cost model, graphs, verification. Runs with and without drafts
alternate, and each pair gives one ratio; the medians are reported. `--seconds` bounds the whole. Before the first run
the shard is idle until it has captured its CUDA graphs, as a server is before its first requests.

All streams of a run begin at once, so a run begins with their prompts, and ends with a few of them: that is in `ratio`.
`ratio_at_full` is of the tokens that came while all streams decoded. `steps` has the means of these steps: their
rows, tokens, seconds on the device, and from the result of the step before to their own.

What such weights cannot show is how often bfloat16 changes a text, because their best token is never in doubt. That is
measured with random ones (`--load-format dummy`), where it is in doubt as often as can be: the share of equal texts and
the tokens up to the first difference, with drafts, and for comparison without drafts but among other requests.
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

from benchmarks.copying import circle, place_for, write_copying_model
from legato.benchmark.engine.session import connect
from legato.benchmark.report import environment, write_json
from legato.benchmark.shard import spawned
from legato.common.gc import freeze_gc
from legato.common.options import DEFAULT_DRAFTS, RouterOptions
from legato.modelfiles.shapes import SHAPES
from legato.router.cli import warm_up
from legato.router.step_loop import StepLoop
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, Output, StepResult
from legato.telemetry.metrics import StepFigures

EDITED, INSTRUCTION = 300, 40  # tokens of a prompt
# For the graphs that a shard captures while it is idle, at most.
CAPTURE_SECONDS = 45.0
# What must be shown: the least ratio by kind and streams.
GOALS = {"edits x 1": 2.0, "edits x 64": 1.1, "edits x 256": 0.99, "new x 1": 0.99, "new x 64": 0.99, "new x 256": 0.99}


class Texts:
    """Prompts, and what the copying model answers."""

    def __init__(self, vocab_size: int, run: float, change: float) -> None:
        self._circle = circle(vocab_size).tolist() * 2
        self._places = {token: place for place, token in enumerate(self._circle[:vocab_size])}
        self._size = vocab_size
        self._run, self._change = run, change
        self._rng = random.Random(5)

    def prompt(self, kind: str, length: int) -> list[int]:
        start = self._rng.randrange(self._size)
        answer = self._circle[start : start + length + 1]
        others = [self._rng.randrange(self._size) for _ in range(INSTRUCTION)]
        code = self._edited(answer[1:]) if kind == "edits" else [self._rng.randrange(self._size) for _ in range(EDITED)]
        return [*others, *code[:EDITED], answer[0]]

    def answer(self, prompt: list[int], length: int) -> list[int]:
        first = self._places[prompt[-1]] + 1
        return self._circle[first : first + length]

    def _edited(self, answer: list[int]) -> list[int]:
        """The answer before it was edited: runs of its tokens, and other tokens where it has its changes."""
        code: list[int] = []
        while len(code) < len(answer):
            place = len(code)
            code += answer[place : place + self._length(self._run)]
            code += [self._rng.randrange(self._size) for _ in range(self._length(self._change))]
        return code

    def _length(self, mean: float) -> int:
        length = 1
        while self._rng.random() > 1 / mean:
            length += 1
        return length


@dataclass
class Pass:
    """Receives the tokens of one run of all streams."""

    num_left: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_drafts: int = 0
    # Steps in which all streams decoded.
    full_steps: list[StepFigures] = field(default_factory=list)
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def put(self, request_id: int, output: Output) -> None:
        if output.error is not None:
            if not self.done.done():
                self.done.set_exception(RuntimeError(output.error))
            return
        self.tokens[request_id].append(output.token_id)
        self.num_drafts += output.is_draft
        if output.finish_reason is not None:
            self.num_left -= 1
            if self.num_left == 0:
                self.done.set_result(None)

    def trace(self, request_id: int, chunk: object) -> None:
        raise AssertionError("nothing is traced here")

    def note(self, step: StepFigures) -> None:
        if step.method == "decode" and step.batch_size == len(self.tokens):
            self.full_steps.append(step)

    @property
    def rate_at_full(self) -> float:
        """Tokens per second while all streams decode."""
        steps = self.full_steps[1:]  # the time to the first is that of a prompt
        seconds = sum(step.gap for step in steps)
        return sum(step.num_tokens for step in steps) / seconds if seconds else 0.0


class OneStream:
    """The shard's stream, which the schedulers with and without drafts use by turns: both keep what they have learned.
    Neither keeps a prefix, as the other would overwrite its blocks."""

    def __init__(self, shards: Any, limits: Any, model_limits: Any, speculate: int) -> None:
        self._shards = shards
        self._loops = {
            count: StepLoop(
                Scheduler(replace(limits, speculate=count, prefix_caching=False, max_requests=None)),
                shards,
                model_limits,
                self._note,
            )
            for count in (0, speculate)
        }
        self._current = self._loops[0]
        self._pass: Pass | None = None

    def _note(self, step: StepFigures) -> None:
        if self._pass is not None:
            self._pass.note(step)

    async def read(self) -> None:
        await self._shards.run(self._deliver)

    def _deliver(self, result: StepResult) -> None:
        self._current._on_result(result)

    async def run(self, requests: Sequence[GenerationRequest], speculate: int) -> tuple[float, Pass]:
        """Seconds, and the tokens by request."""
        loop = self._current = self._loops[speculate]
        current = self._pass = Pass(len(requests), {request.id: [] for request in requests})
        started = time.perf_counter()
        for request in requests:
            loop.submit(request, current)  # type: ignore[arg-type]
        await current.done
        seconds = time.perf_counter() - started
        while loop.scheduler.num_in_flight:  # a step that ran ahead of the last token
            await asyncio.sleep(0.001)
        self._pass = None
        return seconds, current


@asynccontextmanager
async def opened(model: str, options: Any) -> AsyncIterator[OneStream]:
    with spawned(model, [f"--speculate={options.speculate}", *options.shard]) as process:
        shards, info = await connect(process)
        rows = max(options.streams)
        warmed, limits = await warm_up(
            shards, info, RouterOptions(max_concurrent_requests=max(rows, 64), max_batch_size=rows)
        )
        stream = OneStream(shards, warmed.limits, limits, options.speculate)
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0.5)
        until = time.monotonic() + CAPTURE_SECONDS
        while (await shards.info()).num_uncaptured and time.monotonic() < until:
            await asyncio.sleep(0.2)
        freeze_gc()
        try:
            yield stream
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await shards.close()


async def speeds(stream: OneStream, texts: Texts, options: Any, until: float) -> dict[str, Any]:
    """All kinds and numbers of streams in turn, until the time is over."""
    ids = itertools.count(1)
    kinds = [(kind, streams) for streams in options.streams for kind in ("edits", "new")]
    found: dict[str, dict[str, list[float]]] = {
        f"{kind} x {streams}": {"without": [], "with": [], "accepted": [], "full_ratio": []} for kind, streams in kinds
    }
    last: dict[str, dict[str, Any]] = {}

    async def measure(kind: str, streams: int, number: int) -> None:
        prompts, length = [texts.prompt(kind, options.tokens) for _ in range(streams)], options.tokens
        rates, at_full, accepted = {}, {}, 0
        for speculate in (0, options.speculate) if number % 2 else (options.speculate, 0):
            # Each of another tenant: no answer is made of the others'.
            numbers = [next(ids) for _ in prompts]
            requests = [
                GenerationRequest(each, prompt, length, ignore_eos=True, tenant=str(each))
                for each, prompt in zip(numbers, prompts, strict=True)
            ]
            seconds, done = await stream.run(requests, speculate)
            rates[bool(speculate)] = streams * length / seconds
            at_full[bool(speculate)] = done.rate_at_full
            last.setdefault(f"{kind} x {streams}", {})["with" if speculate else "without"] = means(done.full_steps)
            accepted += done.num_drafts
            for each, prompt in zip(numbers, prompts, strict=True):
                assert done.tokens[each] == texts.answer(prompt, length), "the answer is not what these weights say"
        if number:
            figures = found[f"{kind} x {streams}"]
            figures["without"].append(rates[False])
            figures["with"].append(rates[True])
            figures["accepted"].append(accepted / (streams * length))
            figures["full_ratio"].append(at_full[True] / at_full[False] if at_full[False] else 0.0)

    for kind, streams in kinds:
        await measure(kind, streams, 0)  # graphs are captured, times are learned
    for number in itertools.count(1):
        for kind, streams in kinds:
            if number > 1 and time.monotonic() > until:
                return {name: {**summary(name, figures), "steps": last[name]} for name, figures in found.items()}
            for _ in range(options.singles if streams == 1 else 1):
                await measure(kind, streams, number)
    raise AssertionError


def summary(name: str, figures: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [after / before for before, after in zip(figures["without"], figures["with"], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "goal": GOALS.get(name),
        "ratio_at_full": round(statistics.median(figures["full_ratio"]), 4),
        "tokens_per_second_without": round(statistics.median(figures["without"]), 1),
        "tokens_per_second_with": round(statistics.median(figures["with"]), 1),
        "accepted_share": round(statistics.median(figures["accepted"]), 4),
        "ratios": [round(ratio, 4) for ratio in sorted(ratios)],
    }


def means(steps: list[StepFigures]) -> list[dict[str, float]]:
    """Of steps without drafts and with."""
    found = []
    for has_drafts in (False, True):
        if chosen := [step for step in steps[1:] if bool(step.num_drafts) == has_drafts]:
            columns = {
                "num_tokens_in": [step.num_computed for step in chosen],
                "num_tokens_out": [step.num_tokens for step in chosen],
                "forward_ms": [1e3 * step.forward_time for step in chosen],
                "total_ms": [1e3 * step.gap for step in chosen],
                "planning_ms": [1e3 * step.planning_time for step in chosen],
            }
            averages = {name: round(statistics.mean(values), 3) for name, values in columns.items()}
            found.append({"has_drafts": has_drafts, "count": len(chosen), "rows": chosen[0].batch_size, **averages})
    return found


async def equality(stream: OneStream, vocab_size: int, options: Any) -> dict[str, Any]:
    """Of random weights. Drafts are what the same requests said before, so they are as many as there can be."""
    rng, ids = random.Random(9), itertools.count(1)
    prompts = [[rng.randrange(10, vocab_size) for _ in range(32)] for _ in range(options.equal_requests)]

    async def answers(speculate: int, at_once: int) -> list[list[int]]:
        found: list[list[int]] = []
        for first in range(0, len(prompts), at_once):
            chosen = prompts[first : first + at_once]
            requests = [
                GenerationRequest(next(ids), prompt, options.equal_tokens, ignore_eos=True) for prompt in chosen
            ]
            done = (await stream.run(requests, speculate))[1]
            num_drafts[0] += done.num_drafts
            found += [done.tokens[request.id] for request in requests]
        return found

    num_drafts = [0]
    expected = await answers(0, 8)
    await answers(options.speculate, 8)  # so that the answers are known
    num_drafts[0] = 0
    drafted = await answers(options.speculate, 8)
    share = num_drafts[0] / (len(prompts) * options.equal_tokens)
    others = await answers(0, 16)
    return {
        "requests": len(prompts),
        "tokens": options.equal_tokens,
        "accepted_share": round(share, 4),
        "with drafts": compared(expected, drafted),
        "without drafts, among 15 instead of 7": compared(expected, others),
    }


def compared(expected: list[list[int]], found: list[list[int]]) -> dict[str, float]:
    pairs = list(zip(expected, found, strict=True))
    same = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs]
    num_different = sum(a != b for a, b in pairs)
    return {
        "equal_texts": round(1 - num_different / len(expected), 4),
        # Of tokens whose texts before them are equal, how many are not.
        "different_per_1000_tokens": round(1000 * num_different / (sum(same) + num_different), 3),
    }


async def main_async(options: Any) -> dict[str, Any]:
    started = time.monotonic()
    vocab_size = int(SHAPES[options.model]["vocab_size"])
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="legato-drafts-", dir=place_for(options.model)) as folder:
        path = write_copying_model(options.model, Path(folder) / options.model)
        print(f"weights written after {time.monotonic() - started:.0f} s", flush=True)
        async with opened(str(path), options) as stream:
            print(f"shard is up after {time.monotonic() - started:.0f} s", flush=True)
            texts = Texts(vocab_size, options.run, options.change)
            until = started + options.seconds - (options.equal_seconds if options.equal_requests else 0)
            figures["speed"] = await speeds(stream, texts, options, until)
    for name, found in figures["speed"].items():
        goal = "" if found["goal"] is None else f", goal {found['goal']}"
        print(
            f"{name}: {found['tokens_per_second_without']:,.0f} tokens/s without drafts,"
            f" {found['tokens_per_second_with']:,.0f} with: {found['ratio']:.3f}{goal};"
            f" {found['ratio_at_full']:.3f} while all decode;"
            f" {found['accepted_share']:.0%} of the tokens were drafts",
            flush=True,
        )
    if options.equal_requests:
        async with opened(options.model, options) as stream:
            figures["equality"] = await equality(stream, vocab_size, options)
        print(f"equality with random weights: {json.dumps(figures['equality'])}", flush=True)
    figures["seconds"] = round(time.monotonic() - started, 1)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama-8b", "tiny"], default="llama-8b", help="the shape")
    parser.add_argument("--speculate", type=int, default=DEFAULT_DRAFTS, help="drafts of a request in a step, at most")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--run", type=float, default=12, help="mean length of what is repeated")
    parser.add_argument("--change", type=float, default=1.5, help="mean length of what is not")
    parser.add_argument("--singles", type=int, default=3, help="requests in a row of one stream")
    parser.add_argument("--seconds", type=float, default=140, help="of the whole; no round begins that would be later")
    parser.add_argument("--equal-requests", type=int, default=64, help="0: leave the equality of texts out")
    parser.add_argument("--equal-tokens", type=int, default=64)
    parser.add_argument("--equal-seconds", type=float, default=40, help="left for that")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("shard", nargs="*", help="more arguments of the shard, after --")
    options = parser.parse_args()
    figures = asyncio.run(main_async(options))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        given = {key: value for key, value in vars(options).items() if key not in ("out", "shard")}
        write_json(options.out, {**environment(), **given, **figures})


if __name__ == "__main__":
    main()
