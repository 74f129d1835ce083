"""The package's fake shard with what the benchmarks need besides, and a program that `spawned` finds in place of ours.

It takes unary calls too, records what it was asked, and fails on command.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc
from legato.server.fake import service as fake
from legato.server.stream import Answer, Context

VOCAB = 300
BLOCK_SIZE = 4
MAX_POSITIONS = 256
MODEL = fake.FakeModel("fake", VOCAB, MAX_POSITIONS, eos_token_ids=[0], token_ids=list(range(1, VOCAB)))


class FakeService(fake.FakeService):
    """Every batch is kept under its id until its requests have all their tokens."""

    def __init__(self, path: str, driven_by_router: bool = False, fail_at_step: int | None = None) -> None:
        super().__init__(MODEL, [f"unix://{path}"], fake.StepCost(), BLOCK_SIZE)
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
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"{method} is not possible while a router is connected"
            )

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        await self._receive("Warmup", request, context)
        return await super().Warmup(request, context)

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

    def _begin_stream(self) -> None:
        super()._begin_stream()
        self.num_streams += 1

    def _submit(self, request: pb.StepRequest) -> Answer:
        if self.fail_at_step is not None and request.id >= self.fail_at_step:
            response = pb.StepResponse(id=request.id, error="out of paper")
            return fake.DueAnswer(response, due=0.0, clock=self._clock)
        return super()._submit(request)

    def _keep(self, batch_id: int, left: int) -> pb.CachedBatch | None:
        if left == 0:
            return None
        self.left[batch_id] = left
        return pb.CachedBatch(id=batch_id)


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
