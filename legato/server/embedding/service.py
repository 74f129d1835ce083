"""The gRPC service of a shard that embeds or classifies texts.

To the router it is a shard like any other: texts are prompts that one step computes whole, and each gets one token,
which means nothing, and a vector. So queue, limits, health and recovery are those of generation. There is no KV cache:
blocks are only numbers here, one for each row.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
import torch

from legato.common.errors import LegatoError
from legato.common.gc import freeze_gc
from legato.common.heartbeat import LoadingReports
from legato.common.options import ServerOptions
from legato.common.progress import WARMED_UP, WARMING_UP
from legato.modelfiles.files import ModelFiles
from legato.models.encoders.batch import EncodedText
from legato.models.encoders.registry import EmbeddingModel
from legato.pb import generate_pb2 as pb
from legato.pb import unpack_token_ids
from legato.server.device import end_if_device_failed
from legato.server.embedding.loading import load
from legato.server.interceptor import RequestRefused
from legato.server.listening import serve, socket_paths, socket_urls
from legato.server.memory.allocator import keep_freed_memory
from legato.server.memory.budget import is_out_of_memory
from legato.server.stream import Answer, Context, StepStreamService
from legato.server.tracing import ShardSpans

logger = logging.getLogger(__name__)
T = TypeVar("T")

# How long the device may take for next to nothing, while it has nothing else to do.
DEVICE_SECONDS = 10.0
RESERVED_BLOCKS = 1
CPU_WARMUP_TOKENS = 512
NOT_FINITE = "the vector has numbers that are not finite; --dtype float32 or bfloat16 has a larger range than float16"


class EmbeddingService(StepStreamService):
    def __init__(
        self,
        model: EmbeddingModel,
        server_urls: list[str],
        dtype: torch.dtype,
        model_type: str,
        engine: ThreadPoolExecutor,
        reports: LoadingReports | None = None,
    ) -> None:
        super().__init__(server_urls)
        self._model = model
        self._dtype = dtype
        self._model_type = model_type
        # The one thread that computes, model loading included.
        self._engine = engine
        self._reports = reports
        self._is_warm = False

    @property
    def is_warm(self) -> bool:
        return self._is_warm

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        model = self._model
        return pb.InfoResponse(
            dtype=str(self._dtype)[6:],
            device_type=model.device.type,
            attention_impl="sdpa",
            block_size=model.encoder.max_tokens + 1,
            vocab_size=model.encoder.vocab_size,
            max_position_embeddings=model.encoder.max_tokens,
            model_type=self._model_type,
            num_steps=self._num_steps,
            embedding=pb.EmbeddingInfo(
                size=model.head.size,
                pooling=model.pooling,
                is_classifier=model.is_classifier,
                max_tokens=model.max_tokens,
            ),
        )

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        """Computes the largest step that may come; on a CPU, where that may take minutes, a part of it."""
        self._refuse_while_streaming("Warmup")
        model = self._model
        longest = min(request.max_input_tokens or model.max_tokens, model.encoder.max_tokens)
        logger.info(WARMING_UP)
        seconds = await self._on_engine("Warmup", lambda: self._largest_step(longest, request.max_prefill_tokens))
        if self._reports is not None:
            self._reports.done()
        freeze_gc()
        self._is_warm = True
        rows = max(request.max_rows, 1)
        logger.info(WARMED_UP, extra={"fields": {"max_input_tokens": longest, "max_rows": rows}})
        return pb.WarmupResponse(
            max_supported_total_tokens=rows * (model.encoder.max_tokens + 1),
            max_input_tokens=longest,
            max_total_tokens=longest + 1,
            # Each request has one, and each running one may ask for another.
            num_blocks=2 * rows + RESERVED_BLOCKS,
            max_rows=rows,
            max_step_ms=int(seconds * 1e3),
        )

    def _largest_step(self, longest: int, most: int) -> float:
        """An estimate of the seconds that it takes."""
        share = min(1.0, CPU_WARMUP_TOKENS / most) if self._model.device.type == "cpu" and most else 1.0
        length = max(1, int(longest * share))
        counts = [length] * max(1, int(most * share) // length)
        started = time.perf_counter()
        try:
            self._model.vectors([EncodedText([0] * count) for count in counts])
            return (time.perf_counter() - started) / share
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise RequestRefused(
                f"a batch of {sum(counts)} tokens does not fit into the device's memory: lower"
                " --max-batch-prefill-tokens or --max-input-tokens"
            ) from None

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        """There is none."""
        return pb.ClearCacheResponse()

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        raise _only_vectors("Prefill")

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        raise _only_vectors("Decode")

    def _begin_stream(self) -> None:
        if not self._is_warm:
            raise RequestRefused("Tokens is not possible: call Warmup first")

    async def _touch_device(self) -> None:
        """On the engine's thread: nothing is in flight."""
        touch = asyncio.get_running_loop().run_in_executor(self._engine, self._touch)
        try:
            await asyncio.wait_for(asyncio.shield(touch), DEVICE_SECONDS)
        except TimeoutError:
            message = f"the device has not finished an addition within {DEVICE_SECONDS:g} s"
            raise RequestRefused(message, grpc.StatusCode.UNAVAILABLE) from None
        except Exception as error:
            end_if_device_failed("a health check", error)
            raise

    def _touch(self) -> None:
        torch.ones((), device=self._model.device).add_(1).item()

    def _submit(self, request: pb.StepRequest) -> Answer:
        arrived = time.perf_counter()
        texts = {
            each.row: EncodedText(unpack_token_ids(each.input_ids), each.second_start) for each in request.admitted
        }
        assert [len(texts[row]) for row in request.rows] == list(request.num_tokens), "texts are computed whole"
        return asyncio.get_running_loop().run_in_executor(self._engine, self._step, request, texts, arrived)

    def _step(self, request: pb.StepRequest, texts: dict[int, EncodedText], arrived: float) -> pb.StepResponse:
        started, step_id = time.perf_counter(), request.id
        try:
            vectors = self._vectors([texts[row] for row in request.rows])
        except Exception as error:
            end_if_device_failed(f"step {step_id}", error)
            logger.error("Step %d failed", step_id, exc_info=None if isinstance(error, LegatoError) else error)
            return pb.StepResponse(id=step_id, error=f"{type(error).__name__}: {error}")
        response = pb.StepResponse(
            id=step_id,
            token_ids=[0] * len(texts),
            logprobs=[0.0] * len(texts),
            vectors=[vector.tobytes() for vector in vectors.numpy()],
        )
        for index in (~vectors.isfinite().all(dim=1)).nonzero().flatten().tolist():
            response.row_errors.add(index=index, message=NOT_FINITE)
        ended = time.perf_counter()
        response.forward_ns, response.total_ns = int((ended - started) * 1e9), int((ended - arrived) * 1e9)
        return response

    def _vectors(self, texts: list[EncodedText]) -> torch.Tensor:
        """A batch that does not fit into memory is computed in two halves."""
        try:
            return self._model.vectors(texts)
        except Exception as error:
            if len(texts) == 1 or not is_out_of_memory(error):
                raise
        half = len(texts) // 2
        return torch.cat([self._vectors(texts[:half]), self._vectors(texts[half:])])

    async def _on_engine(self, method: str, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._engine, call)
        except Exception as error:
            end_if_device_failed(method, error)
            raise


def _only_vectors(method: str) -> RequestRefused:
    return RequestRefused(
        f"{method}: this shard embeds texts (--task embed); one with --task generate generates them",
        grpc.StatusCode.UNIMPLEMENTED,
    )


def run(files: ModelFiles, options: ServerOptions) -> None:
    """A shard as a process: load, then serve."""
    keep_freed_memory()
    engine, reports = ThreadPoolExecutor(1, thread_name_prefix="engine"), LoadingReports()
    reports.advance()  # torch is imported
    model, dtype = engine.submit(lambda: load(files, options, reports.advance)).result()
    model_type = str(files.config().get("model_type"))
    service = EmbeddingService(model, socket_urls(options), dtype, model_type, engine, reports)
    reports.done()
    asyncio.run(serve(service, socket_paths(options)[options.rank], ShardSpans.open(options)))
