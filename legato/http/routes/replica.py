"""GET /replica/state: what a balancer wants to know of this server, once a second: can it take requests, how many has
it, and how much of its memory is free."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

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
