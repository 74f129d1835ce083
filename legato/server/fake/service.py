"""`text-generation-server serve --fake`: a shard without a model, to measure and test everything but the model.

It reads the model's configuration and tokenizer but no weights, and does not import torch. Steps take the time that the
options say, one after the other as on a device: the next begins when the last has ended, if it had arrived by then.
Grammars are accepted and not applied.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from legato.common.errors import LegatoError, ModelFileError
from legato.common.heartbeat import LoadingReports
from legato.common.options import DEFAULT_DRAFTS, ServerOptions
from legato.common.progress import WARMED_UP
from legato.grammar.wire import from_pb
from legato.modelfiles.files import ModelFiles
from legato.pb import generate_pb2 as pb
from legato.server.fake.adapters import FakeAdapters
from legato.server.fake.script import read_script
from legato.server.fake.shard import BrokenContract, FakeEngine, FakeLimits, Script
from legato.server.interceptor import RequestRefused
from legato.server.listening import serve, socket_paths, socket_urls
from legato.server.nodes.place import open_network, place_of
from legato.server.stream import Answer, Context, StepStreamService
from legato.server.tracing import ShardSpans

logger = logging.getLogger(__name__)

DEFAULT_ROWS = 128
DEFAULT_POSITIONS = 2048
RESERVED_BLOCKS = 1


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
class DueAnswer:
    """An answer and when it is due, by `time.perf_counter`. Awaiting it waits until then."""

    response: pb.StepResponse
    due: float
    # The event loop counts in milliseconds, which is too coarse to wait for a step.
    clock: ThreadPoolExecutor

    def __await__(self) -> Generator[Any, None, pb.StepResponse]:
        delay = self.due - time.perf_counter()
        if delay > 0:
            yield from asyncio.get_running_loop().run_in_executor(self.clock, time.sleep, delay)
        return self.response


class FakeService(StepStreamService):
    def __init__(
        self,
        model: FakeModel,
        server_urls: list[str],
        cost: StepCost,
        block_size: int = 16,
        prefix_caching: bool = True,
        max_drafts: int = 0,
        script: Script | None = None,
        adapters: FakeAdapters | None = None,
    ) -> None:
        super().__init__(server_urls)
        self._adapters = adapters or FakeAdapters()
        self._model = model
        self._cost = cost
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._max_drafts = max_drafts
        self._script = script
        self._engine: FakeEngine | None = None
        self._clock = ThreadPoolExecutor(1, thread_name_prefix="clock")
        self._busy_until = 0.0

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        """Device and number format say what this is, so that no figure passes for that of a real shard."""
        return pb.InfoResponse(
            dtype="fake",
            device_type="fake",
            max_drafts=self._max_drafts,
            support_chunking=True,
            use_prefix_caching=self._prefix_caching,
            attention_impl="fake",
            block_size=self._block_size,
            eos_token_ids=self._model.eos_token_ids,
            vocab_size=self._model.vocab_size,
            max_position_embeddings=self._model.max_positions,
            model_type=self._model.model_type,
            num_steps=self._num_steps,
            adapters=self._adapters.loaded.values(),
            num_adapter_pages=self._adapters.num_pages,
        )

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        try:
            return pb.LoadAdapterResponse(adapter=self._adapters.load(request.adapter_id, request.path))
        except LegatoError as error:
            return pb.LoadAdapterResponse(error=str(error))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        self._adapters.unload(request.adapter_id)
        return pb.UnloadAdapterResponse()

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
        self._engine = FakeEngine(limits, self._model.token_ids, self._script, self._adapters)
        logger.info(WARMED_UP, extra={"fields": {"kv_blocks": limits.num_blocks, "max_total_tokens": total}})
        return pb.WarmupResponse(
            max_supported_total_tokens=usable * self._block_size,
            max_input_tokens=min(request.max_input_tokens or total - 1, total - 1),
            max_total_tokens=total,
            num_blocks=limits.num_blocks,
            max_rows=max_rows,
        )

    def _begin_stream(self) -> None:
        if self._engine is None:
            raise RequestRefused("Tokens is not possible: call Warmup first")

    def _submit(self, request: pb.StepRequest) -> Answer:
        """The step is checked as it arrives, so that one that waits for the device loses no time when it is free."""
        assert self._engine is not None
        arrived, cost = time.perf_counter(), self._cost.of(request)
        try:
            response = self._engine.run(request)
        except BrokenContract as error:
            logger.error("Step %d breaks the contract: %s", request.id, error)
            response = pb.StepResponse(id=request.id, error=str(error))
        finished = time.perf_counter()
        self._busy_until = max(self._busy_until, arrived) + cost
        response.forward_ns = int(cost * 1e9)
        response.total_ns = int((max(finished, self._busy_until) - arrived) * 1e9)
        return DueAnswer(response, self._busy_until, self._clock)


def _only_steps(method: str) -> RequestRefused:
    return RequestRefused(f"{method}: a fake shard supports the Tokens stream only", grpc.StatusCode.UNIMPLEMENTED)


def run(files: ModelFiles, options: ServerOptions) -> None:
    cost = StepCost(options.fake_step_ms / 1e3, options.fake_token_ms / 1e3)
    model, urls = FakeModel.read(files), socket_urls(options)
    script = None if options.fake_script is None else read_script(options.fake_script, files)
    drafts = DEFAULT_DRAFTS if options.speculate is None else options.speculate
    service = FakeService(
        model, urls, cost, options.block_size, options.prefix_caching, drafts, script,
        FakeAdapters.open(options),
    )  # fmt: skip
    path = socket_paths(options)[options.rank]
    if (place := place_of(options)) is not None:
        open_network(place, options, files, path)
    LoadingReports().done()
    asyncio.run(serve(service, path, ShardSpans.open(options)))
