"""The common part of all shard services: discovery, health, and the stream of one router."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeAlias

import grpc

from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as pb_grpc
from legato.server.interceptor import RequestRefused
from legato.server.tracing import ShardSpans

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Answer: TypeAlias = Awaitable[pb.StepResponse]

# How long a router that still has something to compute may take to send its next step.
QUIET_SECONDS = 1.0


class StepStreamService(pb_grpc.TextGenerationServiceServicer):
    # Set if calls and steps are traced.
    spans: ShardSpans | None = None

    def __init__(self, server_urls: list[str]) -> None:
        self._server_urls = server_urls
        # Steps on their way to a router, in order. While there is a queue, that router owns all rows and blocks.
        self._answers: asyncio.Queue[Answer | None] | None = None
        self._in_flight = 0
        self._last_step = 0.0
        self._num_steps = 0

    @abstractmethod
    def _begin_stream(self) -> None:
        """A router takes over. RequestRefused before warm-up."""

    @abstractmethod
    def _submit(self, request: pb.StepRequest) -> Answer:
        """Run a step behind those that were submitted before it. Called from the event loop; does not wait."""

    async def stop(self) -> None:
        """End a router's stream once it sends no more steps: it may have got the same signal and be finishing."""
        while self._answers is not None and (self._in_flight or time.monotonic() < self._last_step + QUIET_SECONDS):
            await asyncio.sleep(0.02)
        if self._answers is not None:
            self._answers.put_nowait(None)

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        """While steps are in flight, they show how the shard is: a long step must not look like a dead shard."""
        if not self._in_flight:
            await self._touch_device()
        return pb.HealthResponse()

    @property
    def is_warm(self) -> bool:
        """Whether `Warmup` was called, with success."""
        return True

    async def num_tokens(self, text: str) -> int:
        """Tokens of a text, special ones included, for clients of `generate.v1`."""
        raise RequestRefused("this shard does not count tokens", grpc.StatusCode.UNIMPLEMENTED)

    async def _touch_device(self) -> None:
        """Make sure that the device computes. An exception is the answer of `Health`."""

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self._server_urls)

    async def Tokens(
        self, request_iterator: AsyncIterator[pb.StepRequest], context: Context
    ) -> AsyncIterator[pb.StepResponse]:
        """Steps are submitted as they arrive, so that the next one starts the moment the last has been launched."""
        try:
            self._refuse_while_streaming("Tokens")
            self._begin_stream()
        except RequestRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        self._answers = answers
        feeder = asyncio.create_task(self._feed(request_iterator, answers))
        try:
            while (answer := await answers.get()) is not None:
                yield await answer
                self._in_flight -= 1
                self._last_step = time.monotonic()
        finally:
            feeder.cancel()
            self._answers, self._in_flight = None, 0

    async def _feed(self, requests: AsyncIterator[pb.StepRequest], answers: asyncio.Queue[Answer | None]) -> None:
        try:
            async for request in requests:
                self._in_flight += 1
                self._num_steps += 1
                answer = self._submit(request)
                if self.spans is not None and request.traces:
                    answer = self.spans.step(request, answer)
                answers.put_nowait(answer)
        finally:
            answers.put_nowait(None)

    def _refuse_while_streaming(self, method: str) -> None:
        if self._answers is not None:
            raise RequestRefused(
                f"{method} is not possible while a router is connected to this shard",
                grpc.StatusCode.FAILED_PRECONDITION,
            )
