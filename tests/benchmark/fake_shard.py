"""A shard without a model, for both ways to drive one. Also a program: what `spawned` finds in place of ours."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc
from legato.pb import unpack_token_ids
from legato.scheduling.state import Admission, GenerationRequest, StepPlan
from tests.fakes import FakeShard

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
VOCAB = 300
BLOCK_SIZE = 4
MAX_POSITIONS = 256


class FakeService(rpc.TextGenerationServiceServicer):
    """Every batch is kept under its id until its requests have all their tokens. Records what it was asked."""

    def __init__(self, path: str, driven_by_router: bool = False, fail_at_step: int | None = None) -> None:
        self.path = path
        self.driven_by_router = driven_by_router
        self.fail_at_step = fail_at_step
        self.calls: list[str] = []
        self.requests: dict[str, list[Any]] = {}
        self.left: dict[int, int] = {}  # batch -> tokens that each of its requests still gets
        self.num_streams = 0

    def of(self, method: str) -> list[Any]:
        return self.requests.get(method, [])

    async def _receive(self, method: str, request: Any, context: Context) -> None:
        self.calls.append(method)
        self.requests.setdefault(method, []).append(request)
        if self.driven_by_router and method in ("Warmup", "Prefill", "Decode"):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{method} is not possible while a router drives")

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        return pb.InfoResponse(
            dtype="torch.float32", device_type="cpu", block_size=BLOCK_SIZE, vocab_size=VOCAB,
            max_position_embeddings=MAX_POSITIONS, model_type="fake", use_prefix_caching=True, eos_token_ids=[0],
        )  # fmt: skip

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        return pb.HealthResponse()

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=[f"unix://{self.path}"])

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        await self._receive("Warmup", request, context)
        return pb.WarmupResponse(
            max_input_tokens=min(request.max_total_tokens, MAX_POSITIONS) - 1,
            max_total_tokens=min(request.max_total_tokens, MAX_POSITIONS),
            num_blocks=request.max_batch_total_tokens // BLOCK_SIZE + 1,
            max_rows=request.max_rows,
        )

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        await self._receive("Prefill", request, context)
        batch = request.batch
        return pb.PrefillResponse(batch=self._keep(batch.id, batch.requests[0].stopping_parameters.max_new_tokens - 1))

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        await self._receive("Decode", request, context)
        (batch,) = request.batches
        return pb.DecodeResponse(batch=self._keep(batch.id, self.left.pop(batch.id) - 1))

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        await self._receive("ClearCache", request, context)
        self.left.clear()
        return pb.ClearCacheResponse()

    async def Tokens(self, request_iterator: AsyncIterator[pb.StepRequest], context: Context) -> Any:
        self.num_streams += 1
        shard = FakeShard(BLOCK_SIZE, VOCAB)
        async for request in request_iterator:
            if self.fail_at_step is not None and request.id >= self.fail_at_step:
                yield pb.StepResponse(id=request.id, error="out of paper")
                continue
            result = shard.run(_plan(request))
            yield pb.StepResponse(id=result.id, token_ids=result.token_ids, logprobs=result.logprobs)

    def _keep(self, batch_id: int, left: int) -> pb.CachedBatch | None:
        if left == 0:
            return None
        self.left[batch_id] = left
        return pb.CachedBatch(id=batch_id)


def _plan(request: pb.StepRequest) -> StepPlan:
    """The plan that the router made the message from, as far as the fake cares."""
    blocks = iter(request.new_blocks)
    return StepPlan(
        request.id,
        [
            Admission(
                each.row, GenerationRequest(each.request_id, [], 1), unpack_token_ids(each.input_ids).tolist(),
                each.num_generated, each.num_cached, list(each.blocks),
            )
            for each in request.admitted
        ],
        list(request.rows),
        list(request.num_tokens),
        [[next(blocks) for _ in range(count)] for count in request.num_new_blocks],
    )  # fmt: skip


@asynccontextmanager
async def listening(service: FakeService) -> AsyncIterator[None]:
    server = grpc.aio.server()
    rpc.add_TextGenerationServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{service.path}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def install(folder: Path) -> Path:
    """A folder with a `text-generation-server` that runs this module. Returns an interpreter to be found beside."""
    script = folder / "text-generation-server"
    root = Path(__file__).parents[2]
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        "from tests.benchmark.fake_shard import main\nmain()\n"
    )
    script.chmod(0o755)
    return folder / "python"


def main() -> None:
    """Serve, or die, as the environment says; leave a record of the arguments."""
    words = sys.argv[1:]
    Path(os.environ["FAKE_RECORD"]).write_text(json.dumps({"words": words, "pid": os.getpid()}))
    if os.environ.get("FAKE_SHARD") == "die":
        print("loading\nerror: the weights are upside down", file=sys.stderr)
        sys.exit(3)
    (path,) = (word.partition("=")[2] for word in words if word.startswith("--uds-path="))

    async def serve() -> None:
        async with listening(FakeService(f"{path}-0")):
            await asyncio.Event().wait()

    asyncio.run(serve())
