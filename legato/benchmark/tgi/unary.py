"""A shard driven with TGI's unary calls, and the time that each of them takes.

    Prefill ─► Decode ─► Decode ─► ... ─► Decode
    ├──────┤   ├────┤                          one number each; the first token is Prefill's
               ├───────── total ──────────┤

Times are those of the caller: transport, tokenizing and detokenizing included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from legato.benchmark.shard import Shard, ShardFailed
from legato.benchmark.stats import Summary
from legato.common.errors import OptionError
from legato.pb import generate_pb2 as pb
from legato.router.shards import GrpcShards


class UnaryShards(GrpcShards):
    """All shards of a model, called together; the slowest sets the time."""

    @classmethod
    async def open(cls, shard: Shard) -> UnaryShards:
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
class Setup:
    """The same for all batch sizes. `prompts` has one for each request of the largest batch."""

    prompts: Sequence[pb.Request]
    sequence_length: int
    decode_length: int
    runs: int
    warmups: int
    parameters: pb.NextTokenChooserParameters
    top_n_tokens: int = 0

    def batch(self, size: int) -> pb.Batch:
        stopping = pb.StoppingCriteriaParameters(max_new_tokens=self.decode_length, ignore_eos_token=True)
        batch = pb.Batch(id=size, size=size, max_tokens=size * (self.sequence_length + self.decode_length))
        for number, prompt in enumerate(self.prompts[:size]):
            request = batch.requests.add()
            request.CopyFrom(prompt)
            request.MergeFrom(
                pb.Request(
                    id=number, parameters=self.parameters, stopping_parameters=stopping, top_n_tokens=self.top_n_tokens
                )
            )
        return batch


@dataclass
class Measured:
    """What was measured for one batch size. Seconds, one entry per run."""

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
        """Milliseconds, by what was timed. Every step counts on its own, so that p99 shows the slow ones."""
        return {
            "Prefill": [seconds * 1e3 for seconds in self.prefills],
            "Decode (token)": [seconds * 1e3 for steps in self.decodes for seconds in steps],
            "Decode (total)": [sum(steps) * 1e3 for steps in self.decodes],
        }

    @property
    def throughputs(self) -> dict[str, list[float]]:
        """Tokens a second, by run: prompt tokens that were read, tokens that were generated."""
        return {
            "Prefill": [self.batch_size * self.sequence_length / seconds for seconds in self.prefills],
            "Decode": [self.batch_size * len(steps) / sum(steps) for steps in self.decodes],
        }

    def latency(self, step: str) -> Summary | None:
        return Summary.of(self.latencies[step])

    def throughput(self, step: str) -> Summary | None:
        return Summary.of(self.throughputs[step])


class Observer(Protocol):
    """Who watches. Called between runs only, so that watching does not cost the shard time."""

    def begin(self, measured: Measured) -> None:
        """A batch size begins; `measured` grows as it goes."""
        ...

    def advance(self) -> None:
        """A run has ended, warm-up or not."""
        ...


async def warm_up(shards: UnaryShards, info: pb.InfoResponse, setup: Setup, largest: int) -> None:
    """Size the cache for the largest batch: the shard may never have been warmed up, or for fewer requests."""
    longest = setup.sequence_length + setup.decode_length
    if info.max_position_embeddings and longest > info.max_position_embeddings:
        raise OptionError(
            f"--sequence-length and --decode-length together are {longest} tokens, but the model takes no more than"
            f" {info.max_position_embeddings}"
        )
    # Every request takes whole blocks.
    taken = -(-longest // info.block_size) * info.block_size if info.block_size else longest
    request = pb.WarmupRequest(
        batch=setup.batch(1),
        max_input_tokens=setup.sequence_length,
        max_prefill_tokens=largest * setup.sequence_length,
        max_total_tokens=taken,
        max_rows=largest,
        max_batch_total_tokens=largest * taken,
    )
    await shards.call("Warmup", request)


async def measure(
    shards: UnaryShards, setup: Setup, batch_sizes: Sequence[int], results: list[Measured], observer: Observer
) -> None:
    """Every batch size in turn. Results grow as they come: an interrupted benchmark still has something to say."""
    try:
        for size in batch_sizes:
            measured = Measured(size, setup.sequence_length)
            results.append(measured)
            observer.begin(measured)
            for number in range(setup.warmups + setup.runs):
                prefill, decodes = await _run(shards, setup.batch(size))
                if number >= setup.warmups:
                    measured.add(prefill, decodes)
                observer.advance()
    finally:
        # Interrupted or not, the shard keeps nothing of ours. If it cannot answer, the error on its way says why.
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
