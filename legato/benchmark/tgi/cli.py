"""`text-generation-benchmark`: how fast a shard reads prompts and generates tokens, at one batch size after another."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from legato.benchmark.machine import circumstances
from legato.benchmark.options import BenchmarkOptions, check_writable, shard_arguments, takes_shard_arguments
from legato.benchmark.shard import Shard, running, spawned
from legato.benchmark.tgi.page import page
from legato.benchmark.tgi.prompts import id_prompts, text_prompts
from legato.benchmark.tgi.report import parameters, tables, to_json
from legato.benchmark.tgi.unary import Measured, Setup, UnaryShards, measure, warm_up
from legato.benchmark.tgi.view import watching
from legato.common.errors import LegatoError, OptionError
from legato.common.program import command, run_program
from legato.pb import generate_pb2 as pb


def run(options: BenchmarkOptions) -> None:
    check_writable("json", options.json)
    check_writable("html", options.html)
    largest = max(options.batch_sizes)
    arguments = shard_arguments(options.spawn is not None, "give --spawn MODEL as well")
    results: list[Measured] = []
    with _shard(options, arguments) as shard:
        try:
            info = asyncio.run(benchmark(options, shard, largest, results))
        except (KeyboardInterrupt, LegatoError):  # what is done is worth showing
            _print_tables(options, [measured for measured in results if measured.prefills])
            raise
    _print_tables(options, results)
    _write_files(options, info, results)


async def benchmark(options: BenchmarkOptions, shard: Shard, largest: int, results: list[Measured]) -> pb.InfoResponse:
    """Fill `results`, one batch size after the other."""
    shards = await UnaryShards.open(shard)
    try:
        info: pb.InfoResponse = await shards.call("Info", pb.InfoRequest())
        setup = _setup(options, info, largest)
        await warm_up(shards, info, setup, largest)
        with watching(not options.no_tui, len(options.batch_sizes), options.warmups + options.runs) as observer:
            await measure(shards, setup, options.batch_sizes, results, observer)
    finally:
        await shards.close()
    return info


def _setup(options: BenchmarkOptions, info: pb.InfoResponse, largest: int) -> Setup:
    length = options.sequence_length
    if options.tokenizer_name is None:
        if not info.vocab_size:
            raise OptionError("the shard does not say how many tokens it knows: give the model's --tokenizer-name")
        prompts = id_prompts(largest, length, info.vocab_size)
    else:
        from legato.modelfiles import hub  # only needed for a tokenizer
        from legato.modelfiles.files import ModelFiles

        files = ModelFiles.open(hub.resolve(options.tokenizer_name, options.revision))
        prompts = text_prompts(largest, length, files.tokenizer())
    return Setup(
        prompts, length, options.decode_length, options.runs, options.warmups, _parameters(options),
        options.top_n_tokens or 0,
    )  # fmt: skip


def _parameters(options: BenchmarkOptions) -> pb.NextTokenChooserParameters:
    """Proto3 cannot tell a zero from what was left out, so what nobody asked for is sent as its neutral value."""

    def given(value: float | None, neutral: float) -> float:
        return neutral if value is None else value

    return pb.NextTokenChooserParameters(
        temperature=given(options.temperature, 1.0),
        top_k=options.top_k or 0,
        top_p=given(options.top_p, 1.0),
        typical_p=given(options.typical_p, 1.0),
        repetition_penalty=given(options.repetition_penalty, 1.0),
        frequency_penalty=options.frequency_penalty or 0.0,
        watermark=options.watermark,
        do_sample=options.do_sample,
    )


@contextmanager
def _shard(options: BenchmarkOptions, arguments: tuple[str, ...]) -> Iterator[Shard]:
    if options.spawn is None:
        yield running(options.master_shard_uds_path)
        return
    with spawned(options.spawn, arguments) as shard:
        yield shard


def _model(options: BenchmarkOptions) -> str:
    return options.spawn or options.tokenizer_name or options.master_shard_uds_path


def _print_tables(options: BenchmarkOptions, results: list[Measured]) -> None:
    if results:
        print(tables(parameters(options, _model(options)), results), flush=True)


def _write_files(options: BenchmarkOptions, info: pb.InfoResponse, results: list[Measured]) -> None:
    around, asked = circumstances(), parameters(options, _model(options))
    shard = {"model_type": info.model_type, "dtype": info.dtype, "device": info.device_type}
    if options.json:
        Path(options.json).write_text(json.dumps(to_json(around, shard, asked, results), indent=2) + "\n")
    if options.html:
        Path(options.html).write_text(page(around, asked, results))


COMMAND = takes_shard_arguments(
    command(BenchmarkOptions, run, "text-generation-benchmark", "Measure a shard at one batch size after another.")
)


def main() -> None:
    sys.exit(run_program(COMMAND))


if __name__ == "__main__":
    main()
