"""POST /vertex: several requests in one, as Vertex AI sends them.

TGI heeded two parameters of an instance, always sampled, and answered every failure with 500. Here an instance is the
native request or a chat with all that belongs to it, and what is wrong with one is said.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from legato.api.errors import InvalidRequest
from legato.http.exchange import Exchange
from legato.http.routes.native import GenerateRoutes
from legato.http.routes.openai.chat import ChatRoutes
from legato.http.routes.platforms.exchanges import Ask, Handler, answer_all, handler_for, text_of
from legato.ipc.settings import RouterSettings

Instance = Annotated[
    Raw,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"$ref": "#/components/schemas/GenerateRequest"},
                {"$ref": "#/components/schemas/ChatRequest"},
            ]
        }
    ),
]


class VertexRequest(Struct, kw_only=True, frozen=True):
    instances: Annotated[
        list[Instance],
        Meta(
            description="Requests of /generate or /v1/chat/completions, processed together.",
            extra_json_schema={"minItems": 1},
        ),
    ]


class VertexResponse(Struct, kw_only=True):
    # The texts, in the order of the instances.
    predictions: list[str]


_decoder = msgspec.json.Decoder(VertexRequest)


class VertexRoutes:
    def __init__(self, settings: RouterSettings, generate: GenerateRoutes, chat: ChatRoutes) -> None:
        self._settings = settings
        self._handlers: dict[str, Handler] = {"inputs": generate.generate, "messages": chat.chat_completions}

    async def vertex(self, exchange: Exchange) -> None:
        request = await exchange.json(_decoder, self._settings.payload_limit)
        if not request.instances:
            raise InvalidRequest("`instances` cannot be empty")
        asks = [self._ask(number, bytes(instance)) for number, instance in enumerate(request.instances)]
        answers = await answer_all(exchange, asks, self._settings.max_concurrent_requests)
        body = msgspec.json.encode(VertexResponse(predictions=[text_of(answer) for answer in answers]))
        await exchange.respond(body, {"content-type": "application/json"})

    def _ask(self, number: int, body: bytes) -> Ask:
        place = f"instances[{number}]"
        try:
            return Ask(place, body, handler_for(body, self._handlers))
        except InvalidRequest as error:
            raise InvalidRequest(f"{place}: {error.problem}") from None
