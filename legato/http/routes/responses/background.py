"""Background responses: the response and its events are written to the store.

Any worker may be asked about them. The one that runs a response looks into the store now and then whether somebody has
cancelled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from legato.api.errors import ClientGone, InternalError, RequestError
from legato.api.responses.events import ResponseFailed
from legato.api.responses.items import ResponseObject
from legato.http.answering import serve
from legato.http.exchange import ROUTE, TENANT, ClientConnection, Exchange
from legato.http.inference import Inference
from legato.http.routes.openai.serving import STREAM_ERRORS
from legato.http.routes.responses.job import ResponseJob, failed
from legato.http.routes.responses.store import ResponseStore
from legato.http.sse import named_event
from legato.http.telemetry.request_log import logger

# Seconds between two looks into the store.
LOOK_EVERY: Final = 0.25


class BackgroundExchange(Exchange):
    """An exchange without a client: events are numbered and stored."""

    def __init__(self, outer: Exchange, store: ResponseStore, response_id: str) -> None:
        # Nothing of the connection, where somebody may follow the events, and no trace, which ended with the request.
        scope = {"type": "http", "headers": [], TENANT: outer.tenant, ROUTE: outer.route}
        super().__init__(scope, outer._receive, outer._send)
        self.body_size = outer.body_size
        self.asker = ClientConnection(outer.tenant)
        self._store = store
        self._id = response_id
        self._num_writes = 0

    @contextmanager
    def client(self) -> Iterator[ClientConnection]:
        yield self.asker

    async def respond(self, body: bytes, headers: Mapping[str, str], *, status: int = 200) -> None:
        """The job has kept it."""

    async def start(self, headers: Mapping[str, str], *, status: int = 200) -> None:
        """There is nobody to tell."""

    async def write(self, data: bytes) -> None:
        await self._store.add_event(self._id, self._num_writes, data)
        self._num_writes += 1

    async def end(self, data: bytes = b"") -> None:
        """The last event says so."""
        if data:
            await self.write(data)


class BackgroundResponses:
    def __init__(self, inference: Inference, store: ResponseStore) -> None:
        self._inference = inference
        self._store = store
        # Referred to here, or they would be collected.
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, exchange: Exchange, job: ResponseJob, *, stream: bool) -> None:
        """The response is in the store by now, with this process as its owner."""
        task = asyncio.create_task(self._run(exchange, job, stream=stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, outer: Exchange, job: ResponseJob, *, stream: bool) -> None:
        exchange = BackgroundExchange(outer, self._store, job.response.id)
        watch = asyncio.create_task(self._watch(exchange, job.response.id))
        try:
            await self._begin(outer.tenant, job.response)
            await serve(exchange, self._inference, lambda: job, STREAM_ERRORS, stream=stream)
            await self._finish(outer.tenant, job.response)  # after the last event: who follows them stops then
        except ClientGone:  # cancelled, which the store says already
            pass
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("A response in the background failed")
            answered = error if isinstance(error, RequestError) else InternalError()
            response = failed(job.response, answered)
            number = next(job.output.numbers)
            await exchange.write(named_event(ResponseFailed(sequence_number=number, response=response)))
            await self._finish(outer.tenant, response)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _begin(self, tenant: str, response: ResponseObject) -> None:
        response.status = "in_progress"
        await self._store.update(tenant, response.id, msgspec.json.encode(response))

    async def _watch(self, exchange: BackgroundExchange, response_id: str) -> None:
        while await self._store.is_running(response_id):
            await asyncio.sleep(LOOK_EVERY)
        exchange.asker.hang_up()

    async def _finish(self, tenant: str, response: ResponseObject) -> None:
        await self._store.finish(tenant, response.id, msgspec.json.encode(response))
