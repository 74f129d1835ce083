"""The health routes. They respond from the state that the scheduler sends every second, so they wait in no queue.

/health, /ping   the model computes: TGI's meaning, false after a failure until a token was generated
/livez           steps advance; false: restart the server
/readyz          requests can be admitted; false: send them elsewhere
/startupz        the model is loaded; until then there is no worker, and the router answers (`router/startup.py`)
/drain           admit no more requests
"""

from __future__ import annotations

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from legato.api.errors import RequestError, Unhealthy
from legato.http.exchange import Exchange
from legato.http.scheduler import NO_STATE, SchedulerClient

JSON = "application/json"
NO_SCHEDULER = "the scheduler does not answer"


class Liveness(Struct, kw_only=True):
    live: bool
    # Seconds for which the oldest step has been computed; 0 without one.
    step_age: float
    # The shards are being replaced.
    restarting: bool


class Readiness(Struct, kw_only=True):
    ready: bool


class Startup(Struct, kw_only=True):
    stage: str
    progress: float


class DrainResponse(Struct, kw_only=True):
    """Requests that are still running and queued."""

    draining: bool
    running: int
    queued: int


class LocalOnly(RequestError):
    """Refused, because without API keys anyone who can reach the port could call it."""

    status, error_type = 403, "unauthorized"

    def __init__(self) -> None:
        super().__init__("A server without API keys is drained from its own machine only: set a key, or call it there")


class HealthRoutes:
    def __init__(self, scheduler: SchedulerClient, *, has_keys: bool) -> None:
        self._scheduler = scheduler
        self._has_keys = has_keys

    async def health(self, request: Request) -> Response:
        if not self._scheduler.state.healthy:
            raise Unhealthy
        return Response()

    async def live(self, request: Request) -> Response:
        state = self._scheduler.state
        if not state.live:
            age = f"no step was finished for {state.step_age:.1f} s"
            raise Unhealthy(NO_SCHEDULER if state is NO_STATE else age)
        return _json(Liveness(live=True, step_age=round(state.step_age, 6), restarting=state.restarting))

    async def ready(self, request: Request) -> Response:
        state = self._scheduler.state
        if state.ready:
            return _json(Readiness(ready=True))
        if state is NO_STATE:
            raise Unhealthy(NO_SCHEDULER)
        if state.draining:
            raise Unhealthy("the server is draining")
        raise Unhealthy("the shards are restarting" if state.restarting else "no token was generated since a failure")

    async def startup(self, request: Request) -> Response:
        return _json(Startup(stage="ready", progress=1.0))

    async def drain(self, exchange: Exchange) -> None:
        if not self._has_keys and not exchange.is_local:
            raise LocalOnly
        await exchange.respond(await self._scheduler.drain(), {"content-type": JSON})


def _json(value: Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
