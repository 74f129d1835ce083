"""POST /v1/responses, and the routes of stored responses.

POST    /v1/responses
POST    /v1/responses/input_tokens         how long the prompt of a response would be
GET     /v1/responses/{id}                 with ?stream=true its events, if it was streamed in the background
DELETE  /v1/responses/{id}
POST    /v1/responses/{id}/cancel          of one in the background
GET     /v1/responses/{id}/input_items
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from legato.api.errors import InvalidRequest, NotFound
from legato.api.responses.events import ResponseFailed
from legato.api.responses.items import DeletedResponse, InputItemList, InputTokenCount, ResponseError, ResponseObject
from legato.api.responses.requests import ResponsesRequest
from legato.http import sse
from legato.http.answering import serve
from legato.http.exchange import Exchange
from legato.http.inference import Inference
from legato.http.routes.openai.conversation import count_tokens
from legato.http.routes.openai.serving import STREAM_ERRORS
from legato.http.routes.openai.token_names import TokenNames
from legato.http.routes.responses.background import LOOK_EVERY, BackgroundResponses
from legato.http.routes.responses.job import ResponseJob
from legato.http.routes.responses.store import ResponseStore, StoredResponse, this_process
from legato.http.routes.responses.tools import ResponseTools
from legato.http.routes.responses.translation import (
    REFERENCE,
    Item,
    chat_request,
    own_items,
    reasoning_wish,
    references_in,
)
from legato.http.sse import named_event
from legato.http.telemetry.request_log import logger

JSON = {"content-type": "application/json"}

_decoder = msgspec.json.Decoder(ResponsesRequest)
_response_decoder = msgspec.json.Decoder(ResponseObject)
_encode = msgspec.json.Encoder().encode


class ResponseRoutes:
    def __init__(self, inference: Inference, names: TokenNames) -> None:
        settings = inference.settings
        self._inference = inference
        self._names = names
        self._payload_limit = settings.payload_limit
        self._store = ResponseStore(settings.response_store, settings.response_store_size)
        self._background = BackgroundResponses(inference, self._store)

    async def responses(self, exchange: Exchange) -> None:
        request = await exchange.json(_decoder, self._payload_limit)
        request = await self._with_items(exchange.tenant, request)
        history = await self._history(exchange.tenant, request.previous_response_id)
        stored = request.store is not False and self._store.is_enabled
        if request.background:
            await self._start(exchange, request, history, stored=stored)
            return
        keep = partial(self._keep, exchange.tenant, request) if stored else None

        def make_job() -> ResponseJob:
            return ResponseJob(request, history, self._inference, self._names, keep)

        await serve(exchange, self._inference, make_job, STREAM_ERRORS, stream=bool(request.stream))

    async def input_tokens(self, exchange: Exchange) -> None:
        inference = self._inference
        request = await self._with_items(exchange.tenant, await exchange.json(_decoder, self._payload_limit))
        history = await self._history(exchange.tenant, request.previous_response_id)
        chat, wish = chat_request(request, history, ResponseTools.of(request.tools)), reasoning_wish(request)
        count = await count_tokens(chat, inference, inference.chat_format, wish, exchange.body_size, exchange.tenant)
        await exchange.respond(_encode(InputTokenCount(input_tokens=count)), JSON)

    async def _history(self, tenant: str, previous: str | None) -> list[Item]:
        """The items of a response and of all that it continues."""
        if previous is None:
            return []
        chain = await self._store.chain(tenant, previous, self._payload_limit)
        if chain is None:
            problem = f"Previous response with id '{previous}' not found"
            raise InvalidRequest(problem, "previous_response_id", "previous_response_not_found")
        if chain[-1].owner is not None and not chain[-1].is_abandoned:
            problem = f"Previous response with id '{previous}' is not complete yet: wait for it, or cancel it"
            raise InvalidRequest(problem, "previous_response_id")
        items: list[Item] = []
        for stored in chain:
            items += msgspec.json.decode(stored.input)
            items += msgspec.json.decode(stored.body)["output"]
        return items

    async def _with_items(self, tenant: str, request: ResponsesRequest) -> ResponsesRequest:
        """The request with stored items in the places of references to them."""
        given = own_items(request)
        references = references_in(given)
        if not references:
            return request
        found = await self._store.items(tenant, references, self._payload_limit)
        for item_id in references:
            if item_id not in found:
                raise NotFound(
                    f"Item with id '{item_id}' not found. Items are not persisted when `store` is set to false."
                )
        items = [found[item["id"]] if item.get("type") == REFERENCE else item for item in given]
        return msgspec.structs.replace(request, input=items)

    async def _keep(self, tenant: str, request: ResponsesRequest, response: ResponseObject) -> None:
        try:
            await self._store.put(tenant, _stored(request, response))
        except (OSError, sqlite3.Error) as error:  # no reason to keep the answer from its client
            logger.warning("A response could not be stored", extra={"fields": {"cause": str(error)}})

    # ---- in the background ----------------------------------------------------------------------------------------

    async def _start(self, exchange: Exchange, request: ResponsesRequest, history: list[Item], *, stored: bool) -> None:
        if not stored:
            raise InvalidRequest("`background` needs `store`, and a server that stores responses", "background")
        job = ResponseJob(request, history, self._inference, self._names, stored=True)
        job.response.status = "queued"
        body = _encode(job.response)
        if not await self._store.put(exchange.tenant, _stored(request, job.response, owner=this_process())):
            raise InvalidRequest("the response is larger than --response-store-size", "input")
        self._background.start(exchange, job, stream=bool(request.stream))
        if request.stream:
            await self._follow(exchange, job.response.id, -1)
        else:
            await exchange.respond(body, JSON)

    async def _follow(self, exchange: Exchange, response_id: str, after: int) -> None:
        """Its events, until the last; those up to the number `after` are left out."""
        await exchange.start(sse.HEADERS)
        place, silent = -1, 0.0
        with exchange.client() as client:
            while True:
                stored = await self._settled(exchange.tenant, response_id)
                ended = stored is None or stored.owner is None
                news = await self._store.events(response_id, place)
                if kept := b"".join(_after(data, after) for _, data in news):
                    await exchange.write(kept)
                    silent = 0.0
                place = news[-1][0] if news else place
                if ended:
                    break
                client.raise_if_gone()
                silent += LOOK_EVERY
                if silent > self._inference.settings.keep_alive:
                    await exchange.write(sse.KEEP_ALIVE)
                    silent = 0.0
                await asyncio.sleep(LOOK_EVERY / 5)
        await exchange.end()

    # ---- of stored responses --------------------------------------------------------------------------------------

    async def response(self, exchange: Exchange) -> None:
        stored = await self._found(exchange)
        if exchange.query.get("stream", "").lower() != "true":
            await exchange.respond(stored.body, JSON)
            return
        if not await self._store.events(stored.id, -1) and stored.owner is None:
            raise InvalidRequest("only responses that were created with `background` and `stream` are streamed again")
        after = exchange.query.get("starting_after", "-1")
        await self._follow(exchange, stored.id, int(after) if after.isdigit() else -1)

    async def delete_response(self, exchange: Exchange) -> None:
        response_id = exchange.path_params["response_id"]
        if not await self._store.delete(exchange.tenant, response_id):
            raise _unknown(response_id)
        await exchange.respond(_encode(DeletedResponse(id=response_id)), JSON)

    async def cancel_response(self, exchange: Exchange) -> None:
        stored = await self._found(exchange)
        response = _response_decoder.decode(stored.body)
        if not response.background:
            raise InvalidRequest("only a response that was created with `background` can be cancelled")
        if stored.owner is not None:
            response.status = "cancelled"
            body = _encode(response)
            if await self._store.finish(exchange.tenant, stored.id, body):
                await exchange.respond(body, JSON)
                return
            stored = await self._found(exchange)  # which was quicker
        await exchange.respond(stored.body, JSON)

    async def response_input_items(self, exchange: Exchange) -> None:
        stored = await self._found(exchange)
        given: list[dict[str, Any]] = msgspec.json.decode(stored.input)
        items = [{"id": f"item_{number}", **item} for number, item in enumerate(given)]
        items.reverse()
        ids = [str(item["id"]) for item in items]
        page = InputItemList(
            data=items, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=False
        )
        await exchange.respond(_encode(page), JSON)

    async def _found(self, exchange: Exchange) -> StoredResponse:
        response_id = exchange.path_params["response_id"]
        stored = await self._settled(exchange.tenant, response_id)
        if stored is None:
            raise _unknown(response_id)
        return stored

    async def _settled(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response as it is stored. One whose process has ended has failed, and so say its events."""
        stored = await self._store.get(tenant, response_id)
        if stored is None or not stored.is_abandoned:
            return stored
        response = _response_decoder.decode(stored.body)
        response.status = "failed"
        response.error = ResponseError(code="server_error", message="The process that worked on it has ended")
        news = await self._store.events(response_id, -1)
        last = max((number for _, data in news for number, _ in _numbered(data)), default=-1)
        event = named_event(ResponseFailed(sequence_number=last + 1, response=response))
        await self._store.finish(tenant, response_id, _encode(response), event)
        return await self._store.get(tenant, response_id)


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.")


def _stored(request: ResponsesRequest, response: ResponseObject, owner: str | None = None) -> StoredResponse:
    items, body = _encode(own_items(request)), _encode(response)
    return StoredResponse(response.id, items, body, request.previous_response_id, owner)


def _after(data: bytes, number: int) -> bytes:
    """The events of one write that have a greater number."""
    return data if number < 0 else b"".join(event for found, event in _numbered(data) if found > number)


def _numbered(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The events of one write, by their numbers; comments have none."""
    for event in data.split(b"\n\n"):
        _, found, fields = event.partition(b"\ndata: ")
        if found:
            yield msgspec.json.decode(fields)["sequence_number"], event + b"\n\n"
