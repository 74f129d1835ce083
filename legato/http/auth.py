"""API keys: the check before every route.

Nothing is reachable without a key unless it is listed as open here, so a new route is closed by default.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.api.errors import RequestError
from legato.http.exchange import ROUTED, TENANT
from legato.ipc.api_keys import tenant_of
from legato.ipc.multiplexing import STREAMS_PATH
from legato.ipc.routed import EVENTS_PATH, STATE_PATH

# What balancers ask.
ROUTED_PATHS = (STATE_PATH, EVENTS_PATH, STREAMS_PATH)
# Load balancers and orchestrators ask for these, and have no keys. They tell nothing but whether the model computes.
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/livez", "/readyz", "/startupz"})
# Pages and what they load: the same for everybody. Who uses them enters a key there.
OPEN_PATHS |= {"/ui", "/dashboard", "/docs"}
OPEN_PATHS |= {f"/pages/{name}" for name in ("style.css", "common.js", "ui.js", "dashboard.js", "icon.svg")}
OPEN_METHODS = frozenset({"GET", "HEAD"})


class Unauthorized(RequestError):
    status, error_type = 401, "unauthorized"
    headers: ClassVar = {"www-authenticate": "Bearer"}


class RequireKey:
    """Refuses requests without a valid key. `refuse` formats the error for the API that the path belongs to."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        refuse: Callable[[str, RequestError, Mapping[str, str]], Response],
        open_paths: Iterable[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._tenants = {key.encode(): tenant_of(key) for key in keys}
        self._refuse = refuse
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The router has no other kind of route, and lifespan events carry no key.
        if scope["type"] != "http" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        given = _given_keys(scope["headers"])
        tenant = self._tenant(given)
        if tenant is not None:
            scope[TENANT] = tenant
            await self._app(scope, receive, send)
            return
        problem = "The API key is not valid" if given else "An API key is needed: send `Authorization: Bearer KEY`"
        error = Unauthorized(problem)
        await self._refuse(scope["path"], error, error.headers)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        if scope["path"] in ROUTED_PATHS and scope.get(ROUTED) is not None:  # the balancer has a key of its own
            return True
        return scope["method"] in OPEN_METHODS and scope["path"] in self._open_paths

    def _tenant(self, given: list[bytes]) -> str | None:
        """Whose key it is. Every key is compared to its end, and none is left out, so that time says nothing about any
        of them."""
        known = self._tenants.items()
        matches = [tenant for candidate in given for key, tenant in known if hmac.compare_digest(key, candidate)]
        return matches[0] if matches else None


def _given_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """What a request shows as keys. Bytes throughout: headers may hold anything."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
    return keys
