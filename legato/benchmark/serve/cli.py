"""`legato bench serve`: load over HTTP on Legato or any other server with TGI's or OpenAI's API."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec

from legato.benchmark.display import Display, display
from legato.benchmark.options import DEFAULT_CONCURRENCY, DEFAULT_REQUESTS, ServeOptions
from legato.benchmark.report import check_writable, environment, percentile, write_json
from legato.benchmark.serve.client import LoadClient
from legato.benchmark.serve.load import LevelRun, num_processes, run_level
from legato.benchmark.serve.report import LevelResult, LoadFigures, Slo, summary, to_json
from legato.benchmark.serve.work import WORDS, Length, LoadLevel, LoadRequest, RequestSource, Target
from legato.common.errors import LegatoError, OptionError
from legato.common.program import command

# Other prompts than those of the load, which would be in the prefix cache after the warm-up.
WARMUP_SEED = -1


class ServerRefused(LegatoError):
    """The server cannot be measured: it does not answer, or answers with an error."""


def run(options: ServeOptions) -> None:
    check_writable("json", options.json)
    levels, source, target = levels_of(options), source_of(options), target_of(options)
    results: list[LevelResult] = []
    try:
        asyncio.run(warm_up(target, source, options.warmups))
        with display(not options.no_tui) as shown:
            measure(options, target, source, levels, results, shown)
    finally:
        # Also after Ctrl-C: show what was measured until then.
        if results:
            print(summary(results), flush=True)
            around = environment()
            if options.api_key:
                around["command"] = around["command"].replace(options.api_key, "...")
            write_json(options.json, to_json(around, _asked(options, target), results))
    if not any(result.figures.num_succeeded for result in results):
        raise ServerRefused("no request succeeded")


def measure(
    options: ServeOptions, target: Target, source: RequestSource, levels: list[LoadLevel], results: list[LevelResult],
    shown: Display,
) -> None:  # fmt: skip
    """Fill `results`, one level after the other. A level that is interrupted has the figures until then."""
    slo = Slo(options.slo_ttft, options.slo_itl)
    for level in levels:
        run, processes = LevelRun(level), num_processes(level, options.processes)
        try:
            run_level(target, source, run, processes, lambda run: _show(shown, run))
        finally:
            if run.records:
                results.append(LevelResult(level, processes, LoadFigures.of(run, slo), run.records))


def _show(shown: Display, run: LevelRun) -> None:
    shown.update(run.level.name, run.share, lambda: _status(run))


def _status(run: LevelRun) -> str:
    num_failed = sum(record.error is not None for record in run.records)
    words = [f"{run.seconds:.0f} s", f"{len(run.records)} done", f"{sum(run.num_open.values())} in flight"]
    if run.seconds:
        words.append(f"{sum(run.num_tokens.values()) / run.seconds:,.0f} tokens/s")
    first_tokens = sorted(record.ttft * 1e3 for record in run.records if record.ttft is not None)
    if first_tokens:
        words.append(f"TTFT p50 {percentile(first_tokens, 50):,.0f} ms")
    if num_failed:
        words.append(f"{num_failed} failed")
    return ", ".join(words)


async def warm_up(target: Target, source: RequestSource, count: int) -> None:
    """Also finds a wrong address or route before anything is measured."""
    client = LoadClient(target, time.perf_counter())
    source = replace(source, seed=WARMUP_SEED)
    for number in range(count):
        record = await client.send(source.request(number), time.perf_counter())
        if record.error is not None:
            raise ServerRefused(
                f"--url http{'s' * target.tls}://{target.host}:{target.port} --api {target.api}:"
                f" {record.error}: {record.detail}"
            )
    client.close()


# ---- from options to what the client processes need -----------------------------------------------------------------


def levels_of(options: ServeOptions) -> list[LoadLevel]:
    if options.concurrency and options.rate:
        raise OptionError("--concurrency is a closed loop and --rate an open one: give only one of them")
    for flag, values in (("--concurrency", options.concurrency), ("--rate", options.rate)):
        if any(value <= 0 for value in values):
            raise OptionError(f"{flag} {min(values):g}: it must be more than 0")
    num_requests = options.num_requests
    if num_requests is None and options.duration is None:
        num_requests = DEFAULT_REQUESTS
    if options.rate:
        return [LoadLevel(None, rate, num_requests, options.duration) for rate in options.rate]
    counts = options.concurrency or (DEFAULT_CONCURRENCY,)
    return [LoadLevel(count, None, num_requests, options.duration) for count in counts]


def source_of(options: ServeOptions) -> RequestSource:
    input_len = Length(options.input_len, options.input_spread)
    output_len = Length(options.output_len, options.output_spread)
    dataset = None if options.dataset is None else read_dataset(Path(options.dataset), options)
    return RequestSource(options.seed, input_len, output_len, words_for(options.tokenizer), dataset)


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
        raise OptionError(
            f"--tokenizer {tokenizer_name}: none of the benchmark's words is a single token; omit the option"
        )
    return found


class _Line(msgspec.Struct):
    """A line of a dataset; other fields are ignored."""

    prompt: str | list[int]
    output_len: int | None = None


def read_dataset(path: Path, options: ServeOptions) -> list[LoadRequest]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"--dataset {path}: {error.strerror}") from None
    requests = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise OptionError(f"--dataset {path}, line {number}: {error}") from None
        if not line.prompt or (line.output_len is not None and line.output_len < 1):
            raise OptionError(f"--dataset {path}, line {number}: the prompt is empty or output_len is less than 1")
        if isinstance(line.prompt, list) and options.api != "completions":
            raise OptionError(f"--dataset {path}, line {number}: only --api completions takes prompts of token ids")
        requests.append(LoadRequest(line.prompt, line.output_len or options.output_len))
    if not requests:
        raise OptionError(f"--dataset {path}: it has no prompt")
    return requests


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
        raise OptionError(f"--url {options.url}: the port must be a number from 1 to 65535") from None
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
        raise ServerRefused(f"{url} returned no list of models ({error}): name it with --model") from None
    if not models:
        raise ServerRefused(f"{url} lists no model: name it with --model")
    return models[0].id


def _asked(options: ServeOptions, target: Target) -> dict[str, Any]:
    """What was asked for, as it stands in the result file."""
    names = (
        "input_len", "input_spread", "output_len", "output_spread", "dataset", "ignore_eos", "extra_body", "seed",
        "num_requests", "duration",
    )  # fmt: skip
    return {
        "server": {"url": options.url, "api": options.api, "model": target.model},
        "work": {name: getattr(options, name) for name in names}
        | {"slo_ttft_ms": options.slo_ttft, "slo_itl_ms": options.slo_itl},
    }


COMMAND = command(ServeOptions, run, "serve", "Measure a server's latency and throughput under load over HTTP.")
