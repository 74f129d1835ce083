"""Drives a shard with TGI's unary calls and measures the time of each.

    Prefill ─► Decode ─► Decode ─► ... ─► Decode
    ├──────┤   ├────┤                          one number each; the first token is Prefill's
               ├───────── total ──────────┤

Times are the caller's: transport, tokenization and detokenization included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from legato.benchmark.options import BenchmarkOptions
from legato.benchmark.shard import ShardFailed, ShardProcess
from legato.common.errors import OptionError
from legato.pb import generate_pb2 as pb
from legato.router.shards import GrpcShards


class UnaryShards(GrpcShards):
    """All shards of a model, called together; the slowest sets the time."""

    @classmethod
    async def open(cls, shard: ShardProcess) -> UnaryShards:
        shards = await shard.connected(cls.connect(shard.socket, shard.connect_timeout))
        assert isinstance(shards, cls)
        return shards

    async def call(self, method: str, request: Any) -> Any:
        """The first shard's answer."""
        try:
            answers = await asyncio.gather(*(getattr(stub, method)(request) for stub in self._stubs))
        except grpc.aio.AioRpcError as error:
            raise _explain(method, error) from None
        return answers[0]


def _explain(method: str, error: grpc.aio.AioRpcError) -> ShardFailed:
    reason = error.details() or error.code().name
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        reason += (
            ". If a router is connected to this shard, stop it (or its launcher), or let --spawn start a shard for the"
            " benchmark alone"
        )
    return ShardFailed(f"the shard refused {method}: {reason}")


@dataclass(frozen=True)
class BatchSpec:
    """Makes the batches. `prompts` has one for each request of the largest batch."""

    options: BenchmarkOptions
    prompts: Sequence[pb.Request]
    sampling: pb.NextTokenChooserParameters

    @property
    def total_tokens(self) -> int:
        """Of one request."""
        return self.options.sequence_length + self.options.decode_length

    def batch(self, size: int) -> pb.Batch:
        batch = pb.Batch(id=size, size=size, max_tokens=size * self.total_tokens)
        common = pb.Request(
            parameters=self.sampling,
            stopping_parameters=pb.StoppingCriteriaParameters(
                max_new_tokens=self.options.decode_length, ignore_eos_token=True
            ),
            top_n_tokens=self.options.top_n_tokens or 0,
        )
        for number, prompt in enumerate(self.prompts[:size]):
            request = batch.requests.add(id=number)
            request.MergeFrom(prompt)
            request.MergeFrom(common)
        return batch


@dataclass
class BatchResult:
    """The measurements of one batch size, in seconds, one entry for each run."""

    batch_size: int
    sequence_length: int
    prefills: list[float] = field(default_factory=list)
    decodes: list[list[float]] = field(default_factory=list)  # the steps of each run

    def add(self, prefill: float, decodes: list[float]) -> None:
        self.prefills.append(prefill)
        if decodes:
            self.decodes.append(decodes)

    @property
    def latencies(self) -> dict[str, list[float]]:
        """In milliseconds. Every decode step counts on its own, so that p99 shows the slow ones."""
        return {
            "Prefill": [seconds * 1e3 for seconds in self.prefills],
            "Decode (token)": [seconds * 1e3 for steps in self.decodes for seconds in steps],
            "Decode (total)": [sum(steps) * 1e3 for steps in self.decodes],
        }

    @property
    def throughputs(self) -> dict[str, list[float]]:
        """Tokens per second of each run: of the prompts, and generated."""
        return {
            "Prefill": [self.batch_size * self.sequence_length / seconds for seconds in self.prefills],
            "Decode": [self.batch_size * len(steps) / sum(steps) for steps in self.decodes],
        }


async def warm_up(shards: UnaryShards, info: pb.InfoResponse, spec: BatchSpec, largest: int) -> None:
    """Size the cache for the largest batch: the shard may never have been warmed up, or for fewer requests."""
    longest = spec.total_tokens
    if info.max_position_embeddings and longest > info.max_position_embeddings:
        raise OptionError(
            f"--sequence-length and --decode-length together are {longest} tokens, but the model takes no more than"
            f" {info.max_position_embeddings}"
        )
    # Every request takes whole blocks.
    taken = -(-longest // info.block_size) * info.block_size if info.block_size else longest
    request = pb.WarmupRequest(
        batch=spec.batch(1),
        max_input_tokens=spec.options.sequence_length,
        max_prefill_tokens=largest * spec.options.sequence_length,
        max_total_tokens=taken,
        max_rows=largest,
        max_batch_total_tokens=largest * taken,
    )
    await shards.call("Warmup", request)


async def measure(
    shards: UnaryShards,
    spec: BatchSpec,
    batch_sizes: Sequence[int],
    results: list[BatchResult],
    on_run: Callable[[BatchResult, int], None],
) -> None:
    """Every batch size in turn. `results` grows meanwhile, so that an interrupted benchmark has some. `on_run` is
    called between runs, with the number of runs of this size."""
    try:
        for size in batch_sizes:
            result = BatchResult(size, spec.options.sequence_length)
            results.append(result)
            for number in range(spec.options.warmups + spec.options.runs):
                prefill, decodes = await _run(shards, spec.batch(size))
                if number >= spec.options.warmups:
                    result.add(prefill, decodes)
                on_run(result, number + 1)
    finally:
        # If the shard cannot answer, the error that is being raised says why.
        with suppress(ShardFailed):
            await shards.call("ClearCache", pb.ClearCacheRequest())


async def _run(shards: UnaryShards, batch: pb.Batch) -> tuple[float, list[float]]:
    """Seconds of the Prefill and of each Decode that follows."""
    seconds = []
    started = time.perf_counter()
    answer = await shards.call("Prefill", pb.PrefillRequest(batch=batch))
    seconds.append(time.perf_counter() - started)
    while answer.HasField("batch"):
        request = pb.DecodeRequest(batches=[answer.batch])
        started = time.perf_counter()
        answer = await shards.call("Decode", request)
        seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1:]
