"""What a balancer wants to know of this server.

GET /replica/state, once a second: can it take requests, how many has it, and how much of its memory is free.
GET /replica/events: what has entered and left its prefix cache. Events have the tokens of everybody's prompts, so only
who knows the route key may read them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from legato.http.exchange import ROUTED
from legato.http.scheduler import SchedulerClient
from legato.ipc.messages import ServerLoad
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
        )
        return Response(msgspec.json.encode(state), media_type="application/json")

    return show


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
