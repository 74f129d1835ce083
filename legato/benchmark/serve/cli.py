"""`legato bench serve`: load over HTTP, on Legato or any server that speaks TGI's or OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec

from legato.benchmark.machine import circumstances
from legato.benchmark.options import check_writable
from legato.benchmark.serve.client import Client
from legato.benchmark.serve.figures import Figures, Result, Slo
from legato.benchmark.serve.load import Counts, num_processes, press
from legato.benchmark.serve.options import ServeOptions
from legato.benchmark.serve.report import page, summary, to_json
from legato.benchmark.serve.view import Watch, watching
from legato.benchmark.serve.work import WORDS, Job, Length, Level, Target, Work
from legato.common.errors import LegatoError, OptionError
from legato.common.program import command

DEFAULT_CONCURRENCY = 16
DEFAULT_REQUESTS = 100
# Long before the first request of the load, so that no warm-up request has a prompt of it.
WARMUP_SEED = -1


class ServerRefused(LegatoError):
    """The server does not answer as it must before a load makes sense."""


def run(options: ServeOptions) -> None:
    check_writable("json", options.json)
    check_writable("html", options.html)
    levels, work, target = levels_of(options), work_of(options), target_of(options)
    slo = Slo(options.slo_ttft, options.slo_itl)
    results: list[Result] = []
    try:
        with watching(not options.no_tui) as watch:
            asyncio.run(measure(options, target, work, levels, slo, results, watch))
    finally:
        # Also after Ctrl-C: what is done is worth showing.
        if results:
            print(summary(results), flush=True)
            _write_files(options, target, results)
    if not any(result.figures.num_succeeded for result in results):
        raise ServerRefused("not a single request succeeded")


async def measure(
    options: ServeOptions, target: Target, work: Work, levels: list[Level], slo: Slo, results: list[Result],
    watch: Watch,
) -> None:  # fmt: skip
    """Fill `results`, one level after the other. A level that is interrupted counts as far as it went."""
    await warm_up(target, work, options.warmups)
    for level in levels:
        counts, processes = Counts(level), num_processes(level, options.processes)
        try:
            await press(target, work, level, processes, counts, watch)
        finally:
            if counts.records:
                results.append(Result(level, processes, Figures.of(counts, slo), counts.records))


async def warm_up(target: Target, work: Work, count: int) -> None:
    """Also the place where a wrong address or route is noticed, before anything is measured."""
    client = Client(target, time.perf_counter())
    before = msgspec.structs.replace(work, seed=WARMUP_SEED)
    for number in range(count):
        record = await client.request(before.job(number), time.perf_counter())
        if record.error is not None:
            raise ServerRefused(
                f"--url http{'s' * target.tls}://{target.host}:{target.port} --api {target.api}:"
                f" {record.error}: {record.detail}"
            )
    client.close()


# ---- options to what the load processes need -------------------------------------------------------------------------


def levels_of(options: ServeOptions) -> list[Level]:
    if options.concurrency and options.rate:
        raise OptionError("--concurrency sends when an answer is complete and --rate by the clock: give either")
    for flag, values in (("--concurrency", options.concurrency), ("--rate", options.rate)):
        if any(value <= 0 for value in values):
            raise OptionError(f"{flag} {min(values):g}: it must be more than 0")
    num_requests = options.num_requests
    if num_requests is None and options.duration is None:
        num_requests = DEFAULT_REQUESTS
    if options.rate:
        return [Level(None, rate, num_requests, options.duration) for rate in options.rate]
    counts = options.concurrency or (DEFAULT_CONCURRENCY,)
    return [Level(count, None, num_requests, options.duration) for count in counts]


def work_of(options: ServeOptions) -> Work:
    input_len = Length(options.input_len, options.input_spread)
    output_len = Length(options.output_len, options.output_spread)
    dataset = None if options.dataset is None else read_dataset(Path(options.dataset), options)
    return Work(options.seed, input_len, output_len, words_for(options.tokenizer), dataset)


def words_for(tokenizer_name: str | None) -> list[str]:
    words = WORDS.split()
    if tokenizer_name is None:
        return words
    from legato.modelfiles import hub  # only needed for a tokenizer
    from legato.modelfiles.files import ModelFiles

    path = Path(tokenizer_name)
    tokenizer = ModelFiles.open(path if path.exists() else hub.resolve(tokenizer_name)).tokenizer()
    found = [word for word in words if len(tokenizer.encode(" " + word, add_special_tokens=False).ids) == 1]
    if not found:
        raise OptionError(f"--tokenizer {tokenizer_name}: none of our words is a single token there; leave it out")
    return found


class _Line(msgspec.Struct):
    """A line of a dataset. Other fields are ignored."""

    prompt: str | list[int]
    output_len: int | None = None


def read_dataset(path: Path, options: ServeOptions) -> list[Job]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"--dataset {path}: {error.strerror}") from None
    jobs = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise OptionError(f"--dataset {path}, line {number}: {error}") from None
        if not line.prompt or (line.output_len is not None and line.output_len < 1):
            raise OptionError(f"--dataset {path}, line {number}: the prompt or the answer would be empty")
        if isinstance(line.prompt, list) and options.api != "completions":
            raise OptionError(f"--dataset {path}, line {number}: only --api completions takes prompts of token ids")
        jobs.append(Job(line.prompt, line.output_len or options.output_len))
    if not jobs:
        raise OptionError(f"--dataset {path}: there is no prompt in it")
    return jobs


def target_of(options: ServeOptions) -> Target:
    parts = urlsplit(options.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError(f"--url {options.url}: it must look like http://host:port")
    tls = parts.scheme == "https"
    try:
        port = parts.port or (443 if tls else 80)
        extra = {} if options.extra_body is None else msgspec.json.decode(options.extra_body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise OptionError(f"--extra-body: {error}") from None
    except ValueError:
        raise OptionError(f"--url {options.url}: the port makes no sense") from None
    model = options.model
    if model is None and options.api != "tgi":
        model = first_model(options)
    return Target(
        parts.hostname, port, tls, options.api, parts.path.rstrip("/"), model, options.api_key, options.ignore_eos,
        extra, options.timeout,
    )  # fmt: skip


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def first_model(options: ServeOptions) -> str:
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    url = f"{options.url.rstrip('/')}/v1/models"
    try:
        with urlopen(Request(url, headers=headers), timeout=min(options.timeout, 30)) as answer:
            models = msgspec.json.decode(answer.read(), type=_Models).data
    except HTTPError as error:
        raise ServerRefused(f"{url}: HTTP {error.code}: name the model with --model") from None
    except (URLError, OSError) as error:
        raise ServerRefused(f"{url}: {getattr(error, 'reason', error)}") from None
    except msgspec.MsgspecError as error:
        raise ServerRefused(f"{url} is no list of models ({error}): name the model with --model") from None
    if not models:
        raise ServerRefused(f"{url} lists no model: name it with --model")
    return models[0].id


# ---- results -------------------------------------------------------------------------------------------------------


def _asked(options: ServeOptions, target: Target) -> dict[str, Any]:
    """In a result file and on the page, below what was measured where."""
    return {
        "server": {"url": options.url, "api": options.api, "model": target.model},
        "work": {
            "input_len": options.input_len,
            "input_spread": options.input_spread,
            "output_len": options.output_len,
            "output_spread": options.output_spread,
            "dataset": options.dataset,
            "ignore_eos": options.ignore_eos,
            "extra_body": options.extra_body,
            "seed": options.seed,
            "num_requests": options.num_requests,
            "duration": options.duration,
            "slo_ttft_ms": options.slo_ttft,
            "slo_itl_ms": options.slo_itl,
        },
    }


def _write_files(options: ServeOptions, target: Target, results: list[Result]) -> None:
    around, asked = circumstances(), _asked(options, target)
    if options.api_key:
        around["command"] = around["command"].replace(options.api_key, "...")
    if options.json:
        Path(options.json).write_text(json.dumps(to_json(around, asked, results), indent=1) + "\n")
    if options.html:
        Path(options.html).write_text(page(around, asked, results))


COMMAND = command(ServeOptions, run, "serve", "Put a server under load over HTTP and measure what its clients see.")
