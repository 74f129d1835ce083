"""`text-generation-server serve --fake`: a shard of a model that is not there, for everything but its thinking.

Of the model it reads the configuration and the tokenizer, never a weight, and torch is not imported. Steps take the
time that the options say, one after the other as on a device: the next begins when the last has ended, if it was there
by then. Grammars are taken note of and not followed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from legato.common.errors import ModelFileError
from legato.common.options import ServerOptions
from legato.common.progress import WARMED_UP
from legato.grammar.wire import from_pb
from legato.modelfiles.files import ModelFiles
from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as pb_grpc
from legato.server.fake.shard import BrokenContract, FakeEngine, FakeLimits
from legato.server.interceptor import RequestRefused
from legato.server.listening import serve, socket_paths, socket_urls

logger = logging.getLogger(__name__)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

DEFAULT_ROWS = 128
DEFAULT_POSITIONS = 2048
RESERVED_BLOCKS = 1
# How long a router that still has something to compute may take to send its next step.
QUIET_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class FakeModel:
    """What the shard says of the model, and with which tokens it answers."""

    model_type: str
    vocab_size: int
    max_positions: int
    eos_token_ids: list[int]
    token_ids: list[int]

    @classmethod
    def read(cls, files: ModelFiles) -> FakeModel:
        config, eos = files.config(), files.eos_token_ids()
        vocab_size = config.get("vocab_size")
        if not isinstance(vocab_size, int):
            raise ModelFileError(f"{files.path}: the configuration has no vocab_size")
        max_positions = config.get("max_position_embeddings") or DEFAULT_POSITIONS
        tokenizer = files.tokenizer()
        # Special tokens decode to nothing, and parts of characters to replacement characters.
        texts = tokenizer.decode_batch([[i] for i in range(min(vocab_size, tokenizer.get_vocab_size()))])
        plain = [i for i, text in enumerate(texts) if text and "\ufffd" not in text and i not in eos]
        if not plain:
            raise ModelFileError(f"{files.path}: the tokenizer has no token that is text")
        return cls(str(config.get("model_type")), vocab_size, int(max_positions), eos, plain)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that a step takes: some for itself, some for each token that it computes."""

    step: float = 0.0
    token: float = 0.0

    def of(self, request: pb.StepRequest) -> float:
        return self.step + self.token * sum(request.num_tokens)


@dataclass(frozen=True, slots=True)
class Done:
    """An answer and when it is due, by `time.perf_counter`."""

    response: pb.StepResponse
    due: float


class FakeService(pb_grpc.TextGenerationServiceServicer):
    def __init__(
        self,
        model: FakeModel,
        server_urls: list[str],
        cost: StepCost,
        block_size: int = 16,
        prefix_caching: bool = True,
    ) -> None:
        self._model = model
        self._server_urls = server_urls
        self._cost = cost
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._engine: FakeEngine | None = None
        # The event loop counts in milliseconds, which is too coarse to wait for a step.
        self._clock = ThreadPoolExecutor(1, thread_name_prefix="clock")
        self._answers: asyncio.Queue[Done | None] | None = None
        self._in_flight = 0
        self._last_step = 0.0
        self._busy_until = 0.0

    async def stop(self) -> None:
        """End a router's stream once it sends no more steps: it may have got the same signal and be finishing."""
        while self._answers is not None and (self._in_flight or time.monotonic() < self._last_step + QUIET_SECONDS):
            await asyncio.sleep(0.02)
        if self._answers is not None:
            self._answers.put_nowait(None)

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        """Device and number format say what this is, so that no figure passes for that of a real shard."""
        return pb.InfoResponse(
            dtype="fake",
            device_type="fake",
            support_chunking=True,
            use_prefix_caching=self._prefix_caching,
            attention_impl="fake",
            block_size=self._block_size,
            eos_token_ids=self._model.eos_token_ids,
            vocab_size=self._model.vocab_size,
            max_position_embeddings=self._model.max_positions,
            model_type=self._model.model_type,
        )

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        return pb.HealthResponse()

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self._server_urls)

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        return pb.ClearCacheResponse()

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        raise _only_steps("Prefill")

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        raise _only_steps("Decode")

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Context) -> pb.FilterBatchResponse:
        raise _only_steps("FilterBatch")

    async def PrepareGrammar(self, request: pb.PrepareGrammarRequest, context: Context) -> pb.PrepareGrammarResponse:
        if from_pb(request) is None:
            return pb.PrepareGrammarResponse(error=f"grammar type {request.grammar_type} is not known to this shard")
        return pb.PrepareGrammarResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        """There is room for everything: as many blocks as all rows could ever need, unless fewer are wanted."""
        self._refuse_while_streaming("Warmup")
        longest = min(request.max_total_tokens or self._model.max_positions, self._model.max_positions)
        max_rows = request.max_rows or DEFAULT_ROWS
        usable = max_rows * -(-longest // self._block_size)
        if request.max_batch_total_tokens:
            usable = min(usable, -(-request.max_batch_total_tokens // self._block_size))
        total = min(longest, usable * self._block_size)
        if total < 2 or (request.max_total_tokens and total < longest):
            raise RequestRefused(
                f"max_total_tokens is {longest}, and the KV cache may hold {usable * self._block_size} tokens"
            )
        # A step may always hold a token of every row.
        most = max(request.max_prefill_tokens, max_rows) if request.max_prefill_tokens else None
        limits = FakeLimits(
            usable + RESERVED_BLOCKS, self._block_size, max_rows, total, most, self._model.vocab_size
        )  # fmt: skip
        self._engine = FakeEngine(limits, self._model.token_ids)
        logger.info(WARMED_UP, extra={"fields": {"kv_blocks": limits.num_blocks, "max_total_tokens": total}})
        return pb.WarmupResponse(
            max_supported_total_tokens=usable * self._block_size,
            max_input_tokens=min(request.max_input_tokens or total - 1, total - 1),
            max_total_tokens=total,
            num_blocks=limits.num_blocks,
            max_rows=max_rows,
        )

    async def Tokens(
        self, request_iterator: AsyncIterator[pb.StepRequest], context: Context
    ) -> AsyncIterator[pb.StepResponse]:
        engine = self._engine
        if engine is None or self._answers is not None:
            reason = "call Warmup first" if engine is None else "a router drives this shard already"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"Tokens is not possible: {reason}")
        assert engine is not None
        answers: asyncio.Queue[Done | None] = asyncio.Queue()
        self._answers = answers
        feeder = asyncio.create_task(self._feed(engine, request_iterator, answers))
        try:
            while (done := await answers.get()) is not None:
                await self._until(done.due)
                yield done.response
                self._in_flight -= 1
                self._last_step = time.monotonic()
        finally:
            feeder.cancel()
            self._answers, self._in_flight = None, 0

    async def _feed(
        self, engine: FakeEngine, requests: AsyncIterator[pb.StepRequest], answers: asyncio.Queue[Done | None]
    ) -> None:
        """Steps are looked at as they arrive, so that one that waits for the device loses no time when it is free."""
        try:
            async for request in requests:
                self._in_flight += 1
                answers.put_nowait(self._run(engine, request))
        finally:
            answers.put_nowait(None)

    def _run(self, engine: FakeEngine, request: pb.StepRequest) -> Done:
        arrived, cost = time.perf_counter(), self._cost.of(request)
        try:
            response = engine.run(request)
        except BrokenContract as error:
            logger.error("Step %d breaks the contract: %s", request.id, error)
            response = pb.StepResponse(id=request.id, error=str(error))
        finished = time.perf_counter()
        self._busy_until = max(self._busy_until, arrived) + cost
        response.forward_ns = int(cost * 1e9)
        response.total_ns = int((max(finished, self._busy_until) - arrived) * 1e9)
        return Done(response, self._busy_until)

    async def _until(self, due: float) -> None:
        delay = due - time.perf_counter()
        if delay > 0:
            await asyncio.get_running_loop().run_in_executor(self._clock, time.sleep, delay)

    def _refuse_while_streaming(self, method: str) -> None:
        if self._answers is not None:
            raise RequestRefused(
                f"{method} is not possible while a router drives this shard", grpc.StatusCode.FAILED_PRECONDITION
            )


def _only_steps(method: str) -> RequestRefused:
    return RequestRefused(f"{method}: a fake shard knows the Tokens stream only", grpc.StatusCode.UNIMPLEMENTED)


def run(files: ModelFiles, options: ServerOptions) -> None:
    cost = StepCost(options.fake_step_ms / 1e3, options.fake_token_ms / 1e3)
    model, urls = FakeModel.read(files), socket_urls(options)
    service = FakeService(model, urls, cost, options.block_size, options.prefix_caching)
    asyncio.run(serve(service, socket_paths(options)[options.rank]))
