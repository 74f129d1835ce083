"""The connections to the shards: every plan is sent to all of them, and the responses of the first are used.

All shards of a model compute the same step and sample the same token from the same gathered logits, so one answer is
as good as another; the others are read and compared (`answers.py`): one that differs or falls silent has failed.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import grpc

from legato.common.errors import LegatoError
from legato.common.sockets import check_peer
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar
from legato.grammar.wire import grammar_type
from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as pb_grpc
from legato.pb import pack_token_ids
from legato.router.answers import StepAnswers
from legato.router.peer import PeerProcess
from legato.scheduling.state import Admission, StepPlan, StepResult

T = TypeVar("T")

FLAG = "--master-shard-uds-path"
# Seconds between questions to shards that work on something else than steps.
HEALTH_INTERVAL = 5.0
# And how long one that is connected to for the first time may take to answer before it is asked again.
HEALTH_SECONDS = 2.0
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 2**31 - 1), ("grpc.max_send_message_length", 2**31 - 1)]


class ShardsLost(LegatoError):
    """A shard exited, cannot be reached, or sent an unexpected response."""


class AdapterFailed(LegatoError):
    """A shard cannot serve an adapter."""


@dataclass(frozen=True, slots=True)
class WarmupLimits:
    max_input_tokens: int | None
    max_total_tokens: int | None
    max_prefill_tokens: int
    max_batch_total_tokens: int | None
    max_rows: int


class GrpcShards:
    def __init__(
        self,
        channels: list[grpc.aio.Channel],
        processes: list[PeerProcess] | None = None,
        hang_timeout: float = math.inf,
    ) -> None:
        self._channels = channels
        self._hang_timeout = hang_timeout
        self._processes = [] if processes is None else processes
        self._stubs = [_stub(channel) for channel in channels]
        self._outboxes: list[asyncio.Queue[pb.StepRequest]] = []
        self._first = 0  # whose tokens count: the first of the last stage
        self._answers = StepAnswers(len(channels))

    @classmethod
    async def connect(
        cls, master_path: str, timeout: float | None = None, hang_timeout: float = math.inf
    ) -> GrpcShards:
        """Wait for the first shard's socket, ask it for the others. Shards that are out of step are killed: others will
        take their place."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    shards = await cls._connect(master_path, hang_timeout)
                    if await shards.are_in_step():
                        return shards
                    shards.kill()
                    await shards.close()
        except TimeoutError:
            raise ShardsLost(f"no shard responds on {master_path} after {timeout:.0f} s") from None

    @classmethod
    async def _connect(cls, master_path: str, hang_timeout: float) -> GrpcShards:
        found = cls([], [], hang_timeout)
        try:
            await found._reach(master_path)
            answer = (await found._all([found._stubs[0].ServiceDiscovery(pb.ServiceDiscoveryRequest())]))[0]
            for path in (url.removeprefix("unix://") for url in answer.urls):
                if path != os.path.abspath(master_path):
                    await found._reach(path)
        except ShardsLost:
            found.kill()
            await found.close()
            raise
        return cls(found._channels, found._processes, hang_timeout)

    async def _reach(self, path: str) -> None:
        """Sends nothing but a greeting to a socket of another user."""
        channel = _channel(f"unix://{os.path.abspath(path)}")
        self._channels.append(channel)
        self._stubs.append(_stub(channel))
        await _until_ready(self._stubs[-1], path, self._hang_timeout)
        try:
            check_peer(path, FLAG)
        except FileNotFoundError:  # its launcher removes the sockets of shards that end
            raise ShardsLost(f"the shard on {path} ended as soon as it answered") from None
        self._processes.append(PeerProcess(path))

    async def are_in_step(self) -> bool:
        """A router that dies may have sent a step to some shards only. Those would wait for the others for ever."""
        if len(self._stubs) == 1:
            return True
        infos = await self._all([stub.Info(pb.InfoRequest()) for stub in self._stubs])
        self._first = len(infos) - len(infos) // max(infos[0].num_stages, 1)
        return len({info.num_steps for info in infos}) == 1

    async def info(self) -> pb.InfoResponse:
        found: list[pb.InfoResponse] = await self._all([self._stubs[0].Info(pb.InfoRequest())])
        return found[0]

    async def warmup(self, limits: WarmupLimits) -> pb.WarmupResponse:
        """What the smallest shard can hold is what all can hold."""
        request = pb.WarmupRequest(
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            max_prefill_tokens=limits.max_prefill_tokens,
            max_rows=limits.max_rows,
            max_batch_total_tokens=limits.max_batch_total_tokens or 0,
        )
        answers: list[pb.WarmupResponse] = await self._all([stub.Warmup(request) for stub in self._stubs])
        return min(answers, key=lambda answer: int(answer.num_blocks))

    async def prepare(self, grammar: Grammar) -> None:
        """Have a grammar compiled before a step needs it. InvalidGrammar if a shard cannot."""
        request = pb.PrepareGrammarRequest(grammar=grammar.value, grammar_type=grammar_type(grammar))
        answers = await self._all([stub.PrepareGrammar(request) for stub in self._stubs])
        for answer in answers:
            if answer.HasField("error"):
                raise GrammarError(answer.error)

    async def load_adapter(self, name: str, path: str) -> pb.AdapterInfo:
        """Have all shards read an adapter from a folder, while steps go on. AdapterFailed."""
        request = pb.LoadAdapterRequest(adapter_id=name, path=path)
        answers = await self._all([stub.LoadAdapter(request) for stub in self._stubs])
        for answer in answers:
            if answer.HasField("error"):
                good = [stub for stub, each in zip(self._stubs, answers, strict=True) if not each.HasField("error")]
                await self._all([stub.UnloadAdapter(pb.UnloadAdapterRequest(adapter_id=name)) for stub in good])
                raise AdapterFailed(answer.error)
        loaded: pb.AdapterInfo = answers[0].adapter
        return loaded

    async def unload_adapter(self, name: str) -> None:
        await self._all([stub.UnloadAdapter(pb.UnloadAdapterRequest(adapter_id=name)) for stub in self._stubs])

    async def release(self, blocks: list[int]) -> None:
        """Give the memory of these blocks back. No step may use them meanwhile."""
        await self._all([stub.ClearCache(pb.ClearCacheRequest(blocks=blocks)) for stub in self._stubs])

    async def _all(self, calls: list[Awaitable[T]]) -> list[T]:
        """The answers of all shards, which may take any time while the shards answer to `Health`."""
        answers = asyncio.gather(*map(_answer, calls))
        try:
            while not (await asyncio.wait([answers], timeout=HEALTH_INTERVAL))[0]:
                if not math.isinf(self._hang_timeout) and not await self.healthy(self._hang_timeout):
                    raise ShardsLost(f"the shards have not responded for {self._hang_timeout:g} s (--hang-timeout)")
            return await answers
        finally:
            answers.cancel()

    async def healthy(self, timeout: float = 5.0) -> bool:
        try:
            await asyncio.gather(*(_answer(stub.Health(pb.HealthRequest(), timeout=timeout)) for stub in self._stubs))
        except ShardsLost:
            return False
        return True

    def send(self, plan: StepPlan) -> None:
        """Hand a plan to every shard without waiting for any."""
        request = _to_pb(plan)
        self._answers.ask(plan.id)
        for outbox in self._outboxes:
            outbox.put_nowait(request)

    async def run(self, on_result: Callable[[StepResult], None]) -> None:
        """Keep the streams open and report every result, in order, until a shard is lost."""
        self._outboxes = [asyncio.Queue() for _ in self._stubs]
        self._answers = StepAnswers(len(self._stubs), self._first)
        streams = [stub.Tokens(_drain(box)) for stub, box in zip(self._stubs, self._outboxes, strict=True)]
        readers = [
            asyncio.ensure_future(_read(rank, stream, self._answers, on_result if rank == self._first else None))
            for rank, stream in enumerate(streams)
        ]
        try:
            await asyncio.gather(*readers)
        finally:
            for reader in readers:
                reader.cancel()

    def kill(self) -> None:
        """All of them, hung or not: shards that have lost one of them, or their router, do not work together again."""
        for process in self._processes:
            process.kill()

    async def close(self) -> None:
        for process in self._processes:
            process.close()
        for channel in self._channels:
            await channel.close()


async def _answer(call: Awaitable[T]) -> T:
    """What a shard says before the stream begins. Its refusal is for a person to read."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise ShardsLost(error.details() or error.code().name) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ShardsLost("the shards were closed") from None  # gRPC cancels the calls of a channel that is closed


async def _until_ready(stub: pb_grpc.TextGenerationServiceStub, path: str, hang_timeout: float) -> None:
    """gRPC backs off for seconds when a socket is not there yet; asking often starts the server sooner. A shard that
    listens and does not answer is killed."""
    silent_since: float | None = None
    while True:
        try:
            await stub.Health(pb.HealthRequest(), timeout=HEALTH_SECONDS)
            return
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ShardsLost(f"the shard on {path} refused: {error.details()}") from None
            now = time.monotonic()
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                silent_since = None
            elif silent_since is None:
                silent_since = now - HEALTH_SECONDS
            if silent_since is not None and now - silent_since > hang_timeout:
                hung = PeerProcess(path)
                hung.kill()
                hung.close()
                silent_since = None
        await asyncio.sleep(0.05)


async def _read(
    rank: int,
    stream: AsyncIterator[pb.StepResponse],
    answers: StepAnswers,
    on_result: Callable[[StepResult], None] | None,
) -> None:
    """Never returns: a stream ends only when its shard does."""
    try:
        async for response in stream:
            if (problem := answers.problem(rank, response)) is not None:
                raise ShardsLost(problem)
            if on_result is not None:
                on_result(_from_pb(response))
    except grpc.aio.AioRpcError as error:
        raise ShardsLost(f"lost shard {rank}: {error.details()}") from None
    raise ShardsLost(f"shard {rank} ended its stream")


async def _drain(outbox: asyncio.Queue[pb.StepRequest]) -> AsyncIterator[pb.StepRequest]:
    while True:
        yield await outbox.get()


def _channel(target: str) -> grpc.aio.Channel:
    backoff = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
    return grpc.aio.insecure_channel(target, options=[*CHANNEL_OPTIONS, *backoff])


def _stub(channel: grpc.aio.Channel) -> pb_grpc.TextGenerationServiceStub:
    return pb_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]  # generated


# ---- plain data to messages and back ----------------------------------------------------------------------------


def _to_pb(plan: StepPlan) -> pb.StepRequest:
    request = pb.StepRequest(
        id=plan.id,
        admitted=[_admission(admission) for admission in plan.admitted],
        rows=plan.rows,
        num_tokens=plan.num_tokens,
        num_new_blocks=[len(blocks) for blocks in plan.new_blocks],
        new_blocks=[block for blocks in plan.new_blocks for block in blocks],
        num_proposals=plan.num_proposals,
    )
    if plan.drafts:
        drafts = [plan.drafts.get(row, []) for row in plan.rows]
        request.num_drafts.extend(map(len, drafts))
        request.draft_ids.extend(chain.from_iterable(drafts))
    for row, traceparent in plan.traces:
        request.traces.add(row=row, traceparent=traceparent)
    for placement in plan.placements:
        request.adapters.add(adapter_id=placement.name, slot=placement.slot, pages=placement.pages)
    for block, slot in plan.copies_out:
        request.copied_out_blocks.append(block)
        request.copied_out_slots.append(slot)
    for slot, block in plan.copies_in:
        request.copied_in_slots.append(slot)
        request.copied_in_blocks.append(block)
    return request


def _admission(admission: Admission) -> pb.Admission:
    """What validation wrote for the shard, and where the scheduler puts it."""
    request, input_ids = admission.request, admission.input_ids
    if request.images:
        for image in request.images:
            token_ids = array("q", [image.token_id]) * image.num_tokens
            input_ids[image.start : image.start + image.num_tokens] = token_ids
    message = pb.Admission.FromString(request.payload)
    message.row = admission.row
    message.request_id = request.id
    message.input_ids = pack_token_ids(input_ids)
    message.num_generated = admission.num_generated
    message.num_cached = admission.num_cached
    message.blocks.extend(admission.blocks)
    message.prompt_logprobs = request.prompt_logprobs and admission.num_generated == 0
    message.max_new_tokens = request.max_new_tokens
    if admission.adapter_name:
        message.adapter_id, message.adapter_slot = admission.adapter_name, admission.adapter_slot
    return message


def _from_pb(response: pb.StepResponse) -> StepResult:
    result = StepResult(
        response.id,
        list(response.token_ids),
        list(response.logprobs),
        list(response.num_sampled),
        list(response.proposed_ids),
        forward_ns=response.forward_ns,
        total_ns=response.total_ns,
        error=response.error if response.HasField("error") else None,
        vectors=list(response.vectors),
    )
    for top in response.top_tokens:
        result.top_tokens[top.index] = list(zip(top.ids, top.logprobs, strict=True))
    for failed in response.row_errors:
        result.row_errors[failed.index] = failed.message
    for prompt in response.prompt_logprobs:
        result.prompt_logprobs[prompt.row] = list(prompt.logprobs)
        if prompt.top_ids:
            likeliest = list(zip(prompt.top_ids, prompt.top_logprobs, strict=True))
            num = len(likeliest) // len(prompt.logprobs)
            result.prompt_top_tokens[prompt.row] = [likeliest[i : i + num] for i in range(0, len(likeliest), num)]
    return result
