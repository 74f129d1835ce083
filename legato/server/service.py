"""The gRPC service of a shard. Everything that touches tensors runs on one thread, in the order of the calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

import grpc
from tokenizers import Tokenizer

from legato.common.errors import LegatoError
from legato.common.gc import freeze_gc
from legato.common.heartbeat import LoadingReports
from legato.common.options import ServerOptions
from legato.grammar.errors import GrammarError
from legato.grammar.wire import from_pb
from legato.modelfiles.files import ModelFiles
from legato.pb import generate_pb2 as pb
from legato.server.adapters import ShardAdapters
from legato.server.device import end_if_device_failed
from legato.server.graphs.steps import StepGraphs
from legato.server.interceptor import RequestRefused
from legato.server.legacy.unary import UnaryBatches
from legato.server.listening import serve, socket_paths, socket_urls
from legato.server.loading import begin_compiler, load
from legato.server.memory.allocator import keep_freed_memory
from legato.server.model import Model
from legato.server.nodes.joining import join_links
from legato.server.pending import PendingStep
from legato.server.rendezvous import end_if_out_of_sync
from legato.server.stream import Answer, Context, StepStreamService
from legato.server.tracing import ShardSpans

logger = logging.getLogger(__name__)
T = TypeVar("T")
# How long no call must have come before the engine's thread captures graphs.
IDLE_SECONDS = 0.25
# How long the device may take for next to nothing, while it has nothing else to do.
DEVICE_SECONDS = 10.0


class TextGenerationService(StepStreamService):
    def __init__(
        self,
        model: Model,
        server_urls: list[str],
        engine: ThreadPoolExecutor | None = None,
        when_warm: Callable[[], None] = lambda: None,
        reports: LoadingReports | None = None,
    ) -> None:
        super().__init__(server_urls)
        self._reports = reports
        self._model = model
        self._when_warm = when_warm
        # The one thread that computes, model loading included: on a CPU a second one that ever did would bring a second
        # team of OpenMP threads, and OpenMP no longer waits actively when it has more threads than cores (43 ms a step
        # instead of 35).
        self._launcher = engine or ThreadPoolExecutor(1, thread_name_prefix="engine")
        # Launches are asynchronous on a GPU, reading waits for it: on two threads they overlap.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._unary: UnaryBatches | None = None
        self._last_call = 0.0
        self._num_calls = 0  # on the engine's thread
        # The request that the shard was warmed up for, and the answer.
        self._warm: tuple[pb.WarmupRequest, pb.WarmupResponse] | None = None
        self._capturing: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        if self._capturing is not None:
            self._capturing.cancel()
        await super().stop()

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        info = self._model.info()
        info.num_steps = self._num_steps
        return info

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        """For a second router with the same limits everything is as it was: weights, cache and graphs stay."""
        self._refuse_while_streaming("Warmup")
        if self._warm is not None and self._warm[0] == request:
            return self._warm[1]
        self._warm = None
        if self._capturing is not None:
            self._capturing.cancel()
        try:
            capacity = await self._on_engine("Warmup", lambda: self._model.warmup(request))
        finally:
            if self._reports is not None:
                self._reports.done()
        self._when_warm()
        self._unary = None
        if self._model.alone and self._model.engine.graphs is not None:
            self._capturing = asyncio.create_task(self._capture_while_idle(self._model.engine.graphs))
        response = pb.WarmupResponse(
            max_supported_total_tokens=(capacity.num_blocks - 1) * self._model.block_size,
            max_input_tokens=capacity.max_input_tokens,
            max_total_tokens=capacity.max_total_tokens,
            num_blocks=capacity.num_blocks,
            max_rows=capacity.max_rows,
            max_unused_blocks=self._model.max_unused_blocks,
            num_host_blocks=0 if self._model.host_blocks is None else self._model.host_blocks.num_slots,
        )
        self._warm = request, response
        return response

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        return await self._on_engine("Prefill", lambda: self._batches("Prefill").prefill(request))

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        return await self._on_engine("Decode", lambda: self._batches("Decode").decode(request))

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Context) -> pb.FilterBatchResponse:
        return await self._on_engine("FilterBatch", lambda: self._batches("FilterBatch").filter(request))

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        """Of unary batches, as in TGI, or of the blocks that a router names."""
        if request.blocks:
            await self._on_engine("ClearCache", lambda: self._model.release_blocks(list(request.blocks)))
            return pb.ClearCacheResponse()
        if self._unary is not None:
            await self._on_engine("ClearCache", lambda: self._batches("ClearCache").clear(request))
        return pb.ClearCacheResponse()

    @property
    def is_warm(self) -> bool:
        return self._warm is not None

    async def num_tokens(self, text: str) -> int:
        return await asyncio.to_thread(lambda: len(self._tokenizer.encode(text).ids))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._model.loaded.files.tokenizer()

    async def PrepareGrammar(self, request: pb.PrepareGrammarRequest, context: Context) -> pb.PrepareGrammarResponse:
        grammar = from_pb(request)
        if grammar is None:
            return pb.PrepareGrammarResponse(error=f"grammar type {request.grammar_type} is not known to this shard")
        try:
            # Shielded: rows wait for the same future, and a caller that gives up must not take it from them.
            await asyncio.shield(asyncio.wrap_future(self._model.grammars.prepare(grammar)))
        except GrammarError as error:
            return pb.PrepareGrammarResponse(error=str(error))
        return pb.PrepareGrammarResponse()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """On a thread of its own: steps go on."""
        adapters = self._adapters()
        loading = asyncio.get_running_loop().run_in_executor(
            adapters.loader, adapters.load, request.adapter_id, request.path
        )
        try:
            return pb.LoadAdapterResponse(adapter=await loading)
        except LegatoError as error:
            return pb.LoadAdapterResponse(error=str(error))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        self._adapters().unload(request.adapter_id)
        return pb.UnloadAdapterResponse()

    def _adapters(self) -> ShardAdapters:
        if self._model.adapters is None:
            raise RequestRefused(
                "this shard does not accept adapters: start it with --lora-adapters or --lora-allow-runtime"
            )
        return self._model.adapters

    def _begin_stream(self) -> None:
        self._model.capacity  # noqa: B018 - refuses before warm-up
        self._unary = None
        # Behind the steps of a router that died, before those of the next.
        self._launcher.submit(self._model.engine.forget_rows)

    async def _touch_device(self) -> None:
        """On the engine's thread, unless that has other work: busy is not dead."""
        if self._num_calls:
            return
        touch = asyncio.get_running_loop().run_in_executor(self._launcher, self._model.touch)
        try:
            await asyncio.wait_for(asyncio.shield(touch), DEVICE_SECONDS)
        except TimeoutError:
            message = f"the device has not finished an addition within {DEVICE_SECONDS:g} s"
            raise RequestRefused(message, grpc.StatusCode.UNAVAILABLE) from None
        except Exception as error:
            end_if_device_failed("a health check", error)
            raise

    def _submit(self, request: pb.StepRequest) -> Answer:
        encoder = self._model.engine.vision_encoder
        if encoder is not None:
            encoder.expect(request.admitted)
        launched = self._launcher.submit(self._launch, request)
        return asyncio.get_running_loop().run_in_executor(self._reader, self._read, launched)

    def _launch(self, request: pb.StepRequest) -> PendingStep | pb.StepResponse:
        launched: PendingStep | pb.StepResponse
        try:
            launched = self._in_sync(f"step {request.id}", lambda: self._model.engine.launch(request))
        except Exception as error:
            launched = _failed(request.id, error)
        graphs = self._model.engine.graphs
        if graphs is not None and (capture := graphs.after_step()) is not None:
            if self._model.alone:
                # Behind the steps that are here already, and after this one's answer.
                self._launcher.submit(capture)
            else:  # at the same step on every shard: a capture has collectives in it
                self._in_sync("a CUDA graph capture", capture)
        return launched

    def _read(self, launched: Future[PendingStep | pb.StepResponse]) -> pb.StepResponse:
        """Wait for the launch, then for the device. An error that only shows here belongs to the step just the same."""
        pending = launched.result()
        if isinstance(pending, pb.StepResponse):
            return pending
        try:
            return self._in_sync(f"step {pending.step_id}", pending.read)
        except Exception as error:
            return _failed(pending.step_id, error)

    def _in_sync(self, doing: str, call: Callable[[], T]) -> T:
        """Run `call`, which has collectives in it. If it fails on this shard alone, or the device fails, the shard
        ends, and with it all."""
        try:
            return call()
        except Exception as error:
            end_if_device_failed(doing, error)
            end_if_out_of_sync(self._model.loaded.shard, doing, error)
            raise

    async def _capture_while_idle(self, graphs: StepGraphs) -> None:
        """One size at a time, so that a request waits for one capture at most. Ends with the last size."""
        loop = asyncio.get_running_loop()
        while graphs.num_pending:
            await asyncio.sleep(IDLE_SECONDS)
            if self._in_flight == 0 and time.monotonic() > max(self._last_step, self._last_call) + IDLE_SECONDS:
                await loop.run_in_executor(self._launcher, graphs.capture_while_idle)

    def _batches(self, method: str) -> UnaryBatches:
        self._refuse_while_streaming(method)
        if self._model.loaded.stage is not None:
            raise RequestRefused(f"{method}: a stage of a pipeline supports the Tokens stream only")
        if self._unary is None:
            self._unary = UnaryBatches(self._model, self._tokenizer)
        return self._unary

    async def _on_engine(self, method: str, call: Callable[[], T]) -> T:
        self._last_call = time.monotonic()
        self._num_calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._launcher, self._in_sync, method, call)
        finally:
            self._num_calls -= 1


def _failed(step_id: int, error: Exception) -> pb.StepResponse:
    """The step and its requests fail. A `LegatoError` says in a sentence what a person can do."""
    if isinstance(error, LegatoError):
        logger.error("Step %d failed: %s", step_id, error)
        return pb.StepResponse(id=step_id, error=str(error))
    logger.error("Step %d failed", step_id, exc_info=error)
    return pb.StepResponse(id=step_id, error=f"{type(error).__name__}: {error}")


def run(files: ModelFiles, options: ServerOptions) -> None:
    """A shard as a process: load, then serve."""
    compiler = begin_compiler(options)  # forks, so before anything else
    keep_freed_memory()
    engine, reports = ThreadPoolExecutor(1, thread_name_prefix="engine"), LoadingReports()
    reports.advance()  # torch is imported
    path = socket_paths(options)[options.rank]
    links = join_links(options, files, path)
    model = engine.submit(
        lambda: Model(load(files, options, reports.advance, links), options, reports.advance, compiler)
    ).result()
    if model.loaded.device.type == "cuda":
        freeze_gc()  # warm-up collects garbage whenever it measures memory: what is loaded need not be looked at again
    service = TextGenerationService(model, socket_urls(options), engine, when_warm=freeze_gc, reports=reports)
    reports.done()
    asyncio.run(serve(service, path, ShardSpans.open(options)))
