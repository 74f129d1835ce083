"""TGI's older contracts on the same socket: `generate.v2` and `generate.v1`, translated to the calls of v3 and back.

Messages that kept their fields are the same bytes in all versions, so they are parsed as each other's. What differs:

v2   prompts are always tokenized with special tokens; nobody chooses blocks or chunks
v1   as v2; one token per generation, as fields of its own; `Warmup` names no limits, and some clients never call it;
     `Tokens` counts the tokens of a text
"""

from __future__ import annotations

from collections.abc import Awaitable
from types import ModuleType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from legato.pb import generate_pb2 as pb
from legato.pb import generate_v1_pb2 as v1
from legato.pb import generate_v1_pb2_grpc as v1_grpc
from legato.pb import generate_v2_pb2 as v2
from legato.pb import generate_v2_pb2_grpc as v2_grpc
from legato.server.interceptor import RequestRefused
from legato.server.stream import Context, StepStreamService

M = TypeVar("M", bound=Message)
SERVICE = "TextGenerationService"


def add_older_contracts(service: StepStreamService, server: grpc.aio.Server) -> list[str]:
    """Serve both beside v3. Returns the names of their services."""
    v2_grpc.add_TextGenerationServiceServicer_to_server(SecondContract(service), server)  # type: ignore[no-untyped-call]
    v1_grpc.add_TextGenerationServiceServicer_to_server(FirstContract(service), server)  # type: ignore[no-untyped-call]
    return [module.DESCRIPTOR.services_by_name[SERVICE].full_name for module in (v2, v1)]


def translated(message: Message, kind: type[M]) -> M:
    """The same fields as a message of another version, without those that it does not know."""
    other = kind.FromString(message.SerializeToString())
    other.DiscardUnknownFields()
    return other


class OlderContract:
    """The calls that both versions have. `messages` is the module with theirs."""

    messages: ModuleType

    def __init__(self, service: StepStreamService) -> None:
        self._service: Any = service  # the stubs that are generated have no types

    async def Info(self, request: Message, context: Context) -> Message:
        return await self._call(self._service.Info(pb.InfoRequest(), context), "InfoResponse")

    async def ServiceDiscovery(self, request: Message, context: Context) -> Message:
        call = self._service.ServiceDiscovery(pb.ServiceDiscoveryRequest(), context)
        return await self._call(call, "ServiceDiscoveryResponse")

    async def Health(self, request: Message, context: Context) -> Message:
        return await self._call(self._service.Health(pb.HealthRequest(), context), "HealthResponse")

    async def ClearCache(self, request: Message, context: Context) -> Message:
        call = self._service.ClearCache(translated(request, pb.ClearCacheRequest), context)
        return await self._call(call, "ClearCacheResponse")

    async def FilterBatch(self, request: Message, context: Context) -> Message:
        call = self._service.FilterBatch(translated(request, pb.FilterBatchRequest), context)
        return await self._call(call, "FilterBatchResponse")

    async def Warmup(self, request: Message, context: Context) -> Message:
        warmup = translated(request, pb.WarmupRequest)
        # The prompts of TGI's batch are together as long as the longest step, and say so by `truncate`.
        warmup.max_prefill_tokens = warmup.max_prefill_tokens or sum(one.truncate for one in warmup.batch.requests)
        warmup.ClearField("batch")
        return await self._call(self._service.Warmup(warmup, context), "WarmupResponse")

    async def _prefill(self, request: Message, context: Context) -> pb.PrefillResponse:
        prefill = translated(request, pb.PrefillRequest)
        for one in prefill.batch.requests:
            one.add_special_tokens = True
        response: pb.PrefillResponse = await self._service.Prefill(prefill, context)
        return response

    async def _decode(self, request: Message, context: Context) -> pb.DecodeResponse:
        response: pb.DecodeResponse = await self._service.Decode(translated(request, pb.DecodeRequest), context)
        return response

    async def _call(self, call: Awaitable[Any], kind: str) -> Message:
        answer: Message = translated(await call, getattr(self.messages, kind))
        return answer


class SecondContract(OlderContract, v2_grpc.TextGenerationServiceServicer):
    messages = v2

    async def Prefill(self, request: v2.PrefillRequest, context: Context) -> v2.PrefillResponse:
        return translated(await self._prefill(request, context), v2.PrefillResponse)

    async def Decode(self, request: v2.DecodeRequest, context: Context) -> v2.DecodeResponse:
        return translated(await self._decode(request, context), v2.DecodeResponse)


class FirstContract(OlderContract, v1_grpc.TextGenerationServiceServicer):
    messages = v1

    async def Prefill(self, request: v1.PrefillRequest, context: Context) -> v1.PrefillResponse:
        try:
            response = await self._prefill(request, context)
        except RequestRefused as error:
            if error.code is not grpc.StatusCode.FAILED_PRECONDITION or self._service.is_warm:
                raise
            await self.Warmup(v1.WarmupRequest(), context)
            response = await self._prefill(request, context)
        return v1.PrefillResponse(generations=map(_first_form, response.generations), batch=_batch(response))

    async def Decode(self, request: v1.DecodeRequest, context: Context) -> v1.DecodeResponse:
        response = await self._decode(request, context)
        return v1.DecodeResponse(generations=map(_first_form, response.generations), batch=_batch(response))

    async def Tokens(self, request: v1.TokensRequest, context: Context) -> v1.TokensResponse:
        return v1.TokensResponse(ntokens=await self._service.num_tokens(request.text))


def _batch(response: pb.PrefillResponse | pb.DecodeResponse) -> v1.CachedBatch | None:
    return translated(response.batch, v1.CachedBatch) if response.HasField("batch") else None


def _first_form(generation: pb.Generation) -> v1.Generation:
    tokens = generation.tokens
    first = v1.Generation(
        request_id=generation.request_id,
        token_id=tokens.ids[0],
        token_logprob=tokens.logprobs[0],
        token_text=tokens.texts[0],
        token_is_special=tokens.is_special[0],
    )
    if generation.HasField("prefill_tokens"):
        first.prefill_tokens.CopyFrom(translated(generation.prefill_tokens, v1.PrefillTokens))
    for top in generation.top_tokens[:1]:
        named = v1.TopTokens(ids=top.ids, logprobs=top.logprobs, texts=top.texts, is_special=top.is_special)
        first.top_tokens.CopyFrom(named)
    if generation.HasField("generated_text"):
        text = translated(generation.generated_text, v1.GeneratedText)
        text.prompt_tokens = generation.generated_text.prompt_tokens
        first.generated_text.CopyFrom(text)
    return first
