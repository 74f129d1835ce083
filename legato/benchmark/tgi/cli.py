"""`text-generation-benchmark`: measures prefill and decode of a shard at a list of batch sizes."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from legato.benchmark.display import Display, display
from legato.benchmark.options import BenchmarkOptions
from legato.benchmark.report import Summary, check_writable, environment, markdown, write_json
from legato.benchmark.shard import ShardProcess, shard_under_test, takes_shard_arguments
from legato.benchmark.tgi.unary import BatchResult, BatchSpec, UnaryShards, measure, warm_up
from legato.common.errors import LegatoError, OptionError
from legato.common.program import command, run_program
from legato.pb import generate_pb2 as pb

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEED = 0
FILLER = (
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore et dolore"
    " magna aliqua. Ut enim ad minim veniam, quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo"
    " consequat. "
)
LATENCY_HEADER = ("Step", "Batch Size", "Average", "Lowest", "Highest", "p50", "p90", "p99")
THROUGHPUT_HEADER = LATENCY_HEADER[:5]


def run(options: BenchmarkOptions) -> None:
    check_writable("json", options.json)
    largest = max(options.batch_sizes)
    socket = options.master_shard_uds_path if options.spawn is None else None
    results: list[BatchResult] = []
    with shard_under_test(socket, options.spawn, "give --spawn MODEL as well") as shard:
        try:
            info = asyncio.run(benchmark(options, shard, largest, results))
        except (KeyboardInterrupt, LegatoError):
            if measured := [result for result in results if result.prefills]:  # print what was measured until here
                print(tables(parameters(options), measured), flush=True)
            raise
    print(tables(parameters(options), results), flush=True)
    write_json(options.json, to_json(environment(), info, parameters(options), results))


async def benchmark(
    options: BenchmarkOptions, shard: ShardProcess, largest: int, results: list[BatchResult]
) -> pb.InfoResponse:
    """Fill `results`, one batch size after the other."""
    shards = await UnaryShards.open(shard)
    try:
        info: pb.InfoResponse = await shards.call("Info", pb.InfoRequest())
        spec = _spec(options, info, largest)
        await warm_up(shards, info, spec, largest)
        with display(not options.no_tui) as shown:

            def on_run(result: BatchResult, num_runs: int) -> None:
                _show(shown, result, num_runs / (options.warmups + options.runs))

            await measure(shards, spec, options.batch_sizes, results, on_run)
    finally:
        await shards.close()
    return info


def _spec(options: BenchmarkOptions, info: pb.InfoResponse, largest: int) -> BatchSpec:
    length = options.sequence_length
    if options.tokenizer_name is None:
        if not info.vocab_size:
            raise OptionError("the shard does not report its vocabulary size: give the model's --tokenizer-name")
        prompts = id_prompts(largest, length, info.vocab_size)
    else:
        from legato.modelfiles import hub  # only needed for a tokenizer
        from legato.modelfiles.files import ModelFiles

        files = ModelFiles.open(hub.resolve(options.tokenizer_name, options.revision))
        prompts = text_prompts(largest, length, files.tokenizer())
    return BatchSpec(options, prompts, _sampling(options))


def id_prompts(count: int, length: int, vocab_size: int) -> list[pb.Request]:
    """Random ids, the same ones every time, of the exact length."""
    rng = random.Random(SEED)
    return [pb.Request(input_ids=[rng.randrange(vocab_size) for _ in range(length)]) for _ in range(count)]


def text_prompts(count: int, length: int, tokenizer: Tokenizer) -> list[pb.Request]:
    """The same text for all. The shard truncates it to `length` tokens, so it may be too long but not too short: text
    that was cut between two tokens may encode to fewer."""
    copies = 1
    while len(ids := tokenizer.encode(FILLER * copies).ids) < length:
        copies *= 2
    text = tokenizer.decode(ids[:length])
    if len(tokenizer.encode(text).ids) < length:
        text = FILLER * copies
    return [pb.Request(inputs=text, truncate=length, add_special_tokens=True) for _ in range(count)]


def _sampling(options: BenchmarkOptions) -> pb.NextTokenChooserParameters:
    """Proto3 cannot tell zero from absent, so absent options are sent as their neutral value."""

    def given(value: float | None) -> float:
        return 1.0 if value is None else value

    return pb.NextTokenChooserParameters(
        temperature=given(options.temperature),
        top_k=options.top_k or 0,
        top_p=given(options.top_p),
        typical_p=given(options.typical_p),
        repetition_penalty=given(options.repetition_penalty),
        frequency_penalty=options.frequency_penalty or 0.0,
        watermark=options.watermark,
        do_sample=options.do_sample,
    )


# ---- results --------------------------------------------------------------------------------------------------------


def _show(shown: Display, result: BatchResult, share: float) -> None:
    if share < 1:
        shown.update(f"batch size {result.batch_size}", share, lambda: f"{len(result.prefills)} runs measured")
    else:
        shown.line(describe(result))


def describe(result: BatchResult) -> str:
    """One batch size in one line."""

    def mean(values: Sequence[float], digits: int = 2) -> str:
        return f"{sum(values) / len(values):,.{digits}f}"

    latencies, throughputs = result.latencies, result.throughputs
    words = [f"batch size {result.batch_size}: prefill {mean(latencies['Prefill'])} ms"]
    words.append(f"{mean(throughputs['Prefill'], 0)} tokens/s")
    if result.decodes:
        words.append(f"decode {mean(latencies['Decode (token)'])} ms/token")
        words.append(f"{mean(throughputs['Decode'], 0)} tokens/s")
    return ", ".join(words)


def parameters(options: BenchmarkOptions) -> dict[str, object]:
    """TGI's names for what was asked for, in its order."""
    names = (
        "sequence_length", "decode_length", "top_n_tokens", "runs", "warmups", "temperature", "top_k", "top_p",
        "typical_p", "repetition_penalty", "frequency_penalty", "watermark", "do_sample",
    )  # fmt: skip
    values = {name.replace("_", " ").title(): getattr(options, name) for name in names}
    model = options.spawn or options.tokenizer_name or options.master_shard_uds_path
    return {"Model": model} | {"N Runs" if name == "Runs" else name: value for name, value in values.items()}


def tables(asked: dict[str, object], results: Sequence[BatchResult]) -> str:
    """TGI's three tables."""
    asked_rows = [
        [name, str(value).lower() if isinstance(value, bool) else str(value)] for name, value in asked.items()
    ]
    latencies = _rows(results, [result.latencies for result in results], LATENCY_HEADER, "ms")
    throughputs = _rows(results, [result.throughputs for result in results], THROUGHPUT_HEADER, "tokens/secs")
    return "\n\n".join(
        [
            markdown(("Parameter", "Value"), asked_rows),
            markdown(LATENCY_HEADER, latencies),
            markdown(THROUGHPUT_HEADER, throughputs),
        ]
    )


def _rows(
    results: Sequence[BatchResult], values: Sequence[dict[str, list[float]]], header: Sequence[str], unit: str
) -> list[list[str]]:
    """Step by step. Only the first row of a step names it, as in TGI's tables."""
    rows = []
    for step in values[0]:
        for number, (result, by_step) in enumerate(zip(results, values, strict=True)):
            summary = Summary.of(by_step[step])
            cells = ["-" if summary is None else f"{getattr(summary, name.lower()):.2f} {unit}" for name in header[2:]]
            rows.append(["" if number else step, str(result.batch_size), *cells])
    return rows


def to_json(
    environment: dict[str, Any], info: pb.InfoResponse, asked: dict[str, object], results: Sequence[BatchResult]
) -> dict[str, Any]:
    def summaries(by_step: dict[str, list[float]]) -> dict[str, Any]:
        found = {step: Summary.of(values) for step, values in by_step.items()}
        return {step: each and {**asdict(each), "values": by_step[step]} for step, each in found.items()}

    return {
        **environment,
        "shard": {"model_type": info.model_type, "dtype": info.dtype, "device": info.device_type},
        "parameters": asked,
        "results": [
            {
                "batch_size": result.batch_size,
                "latency_ms": summaries(result.latencies),
                "throughput_tokens_per_second": summaries(result.throughputs),
            }
            for result in results
        ],
    }


COMMAND = takes_shard_arguments(
    command(BenchmarkOptions, run, "text-generation-benchmark", "Measure a shard at one batch size after another.")
)


def main() -> None:
    sys.exit(run_program(COMMAND))


if __name__ == "__main__":
    main()
