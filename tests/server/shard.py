"""A real shard in this process: the gRPC service on a socket of its own, with a tiny model behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from legato.common.options import ServerOptions
from legato.modelfiles.files import ModelFiles
from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as rpc
from legato.server.listening import listen
from legato.server.loading import LoadedModel, load
from legato.server.model import Model
from legato.server.service import TextGenerationService

# Tokens are compared with those of transformers.
OPTIONS = ServerOptions(device="cpu", dtype="float32", block_size=4)


def load_model(folder: Path) -> LoadedModel:
    return load(ModelFiles.open(folder), OPTIONS)


@asynccontextmanager
async def serving(loaded: LoadedModel, socket: Path) -> AsyncIterator[rpc.TextGenerationServiceStub]:
    """The stub of a shard that listens on `socket`. It is cold: nobody has called Warmup."""
    service = TextGenerationService(Model(loaded, OPTIONS), [f"unix://{socket}"])
    server = await listen(service, str(socket))
    try:
        async with grpc.aio.insecure_channel(f"unix://{socket}") as channel:
            yield rpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
    finally:
        await server.stop(None)


def warmup(**changes: int) -> pb.WarmupRequest:
    settings: dict[str, Any] = {
        "max_rows": 8,
        "max_total_tokens": 128,
        "max_batch_total_tokens": 512,
        "max_prefill_tokens": 64,
    }
    return pb.WarmupRequest(**{**settings, **changes})


# ---- the words of its clients ---------------------------------------------------------------------------------------


def request(request_id: int, ids: list[int], max_new_tokens: int, **more: Any) -> pb.Request:
    stop, ignore_eos = more.pop("stop", ()), more.pop("ignore_eos", True)
    stopping = pb.StoppingCriteriaParameters(
        max_new_tokens=max_new_tokens, stop_sequences=stop, ignore_eos_token=ignore_eos
    )
    return pb.Request(id=request_id, input_ids=ids, stopping_parameters=stopping, **more)


def prefill(batch_id: int, *requests: pb.Request, join: pb.CachedBatch | None = None) -> pb.PrefillRequest:
    return pb.PrefillRequest(batch=pb.Batch(id=batch_id, requests=requests, size=len(requests)), cached_batch=join)


def decode(*batches: pb.CachedBatch | None) -> pb.DecodeRequest:
    return pb.DecodeRequest(batches=[batch for batch in batches if batch is not None])


class Log:
    """What a client of the shard has seen of each request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, pb.GeneratedText] = {}
        self.pieces: dict[int, str] = {}

    def add(self, answer: pb.PrefillResponse | pb.DecodeResponse) -> pb.CachedBatch | None:
        for generation in answer.generations:
            self.tokens.setdefault(generation.request_id, []).extend(generation.tokens.ids)
            self.pieces[generation.request_id] = self.pieces.get(generation.request_id, "") + "".join(
                text for text, special in zip(generation.tokens.texts, generation.tokens.is_special, strict=True)
                if not special
            )  # fmt: skip
            if generation.HasField("generated_text"):
                self.texts[generation.request_id] = generation.generated_text
        return answer.batch if answer.HasField("batch") else None


async def finish(shard: rpc.TextGenerationServiceStub, log: Log, batch: pb.CachedBatch | None) -> None:
    while batch is not None:
        batch = log.add(await shard.Decode(decode(batch)))


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""
