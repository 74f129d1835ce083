"""The routes for balancers.

GET /replica/state, once a second: can it take requests, how many has it, and how much of its memory is free.
GET /replica/streams: makes the connection one for many requests (`ipc/multiplexing.py`).
GET /replica/events: what has entered and left its prefix cache. Events have the tokens of everybody's prompts, so only
who knows the route key may read them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from legato.http.exchange import ROUTED, SWITCH
from legato.http.scheduler import SchedulerClient
from legato.ipc.messages import ServerLoad
from legato.ipc.multiplexing import UPGRADE
from legato.ipc.routed import ReplicaState
from legato.ipc.settings import RouterSettings

_load_decoder = msgspec.json.Decoder(ServerLoad)


def replica_state(scheduler: SchedulerClient, settings: RouterSettings) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:
        load = _load_decoder.decode(await scheduler.load())
        state = ReplicaState(
            ready=scheduler.state.ready,
            draining=scheduler.state.draining,
            model_id=settings.model_id,
            model_sha=settings.model_sha,
            version=settings.version,
            max_requests=settings.max_concurrent_requests,
            resumes=request.scope.get(ROUTED) is not None,
            epoch=load.epoch,
            running=load.running,
            queued=load.queued,
            max_rows=load.max_rows,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            block_size=load.block_size,
            http_workers=settings.http_workers,
        )
        return Response(msgspec.json.encode(state), media_type="application/json")

    return show


class ReplicaStreams:
    """An ASGI application, because it answers with the connection itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        switch: Callable[[], None] | None = scope.get(SWITCH)
        if scope.get(ROUTED) is None:
            answer = JSONResponse({"error": "the route key is needed", "error_type": "forbidden"}, 403)
            await answer(scope, receive, send)
        elif switch is None or (b"upgrade", UPGRADE) not in scope["headers"]:
            problem = "the connection cannot be taken over: send `Upgrade: legato-streams` with HTTP/1.1"
            await JSONResponse({"error": problem, "error_type": "validation"}, 426)(scope, receive, send)
        else:
            switch()


def replica_events(scheduler: SchedulerClient) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:
        if request.scope.get(ROUTED) is None:
            return JSONResponse({"error": "the route key is needed", "error_type": "forbidden"}, 403)
        after = request.query_params.get("after", "")
        if after and not after.isdecimal():
            return JSONResponse({"error": "after: expected a number", "error_type": "validation"}, 422)
        page = await scheduler.kv_events(int(after) if after else None)
        if page is None:
            return JSONResponse({"error": "the server was started without --kv-events", "error_type": "not_found"}, 404)
        return Response(page, media_type="application/json")

    return show
