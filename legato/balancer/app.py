"""The balancer as an ASGI application: it serves its own routes and forwards all others to a replica."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from starlette.types import Receive, Scope, Send

from legato.api.errors import ClientGone, InternalError, NotFound, RequestError
from legato.balancer.admission import KeyShares
from legato.balancer.answers import ReplicaLost
from legato.balancer.calls import ClientCall
from legato.balancer.forwarding import Forwarding, NoReplica
from legato.balancer.metrics import RouteMetrics
from legato.balancer.options import BalancerOptions
from legato.balancer.probing import Probes
from legato.balancer.replicas import Replica, ReplicaSet
from legato.balancer.replies import Reply
from legato.balancer.selection import Selection
from legato.http.exchange import Exchange
from legato.telemetry.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

JSON = b"application/json"
HEALTH = frozenset({"/health", "/ping", "/readyz", "/startupz"})
# Of one server, which a client of the balancer cannot name.
NOT_FORWARDED = ("/drain", "/replica/")
# Changes that every replica must make.
BROADCAST = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


class Balancer:
    def __init__(self, options: BalancerOptions, replicas: ReplicaSet) -> None:
        self._options = options
        self.replicas = replicas
        self.selection = Selection(replicas, options.policy)
        self.metrics = RouteMetrics(replicas, self.selection)
        self.admission = KeyShares(options.max_concurrent_requests)
        self.probes = Probes(replicas, options.route_key, options.probe_interval, options.probe_timeout, self._on_state)
        replicas.on_join = self.probes.start
        replicas.on_leave = self._on_leave
        self._loop = asyncio.get_running_loop()

    def _on_state(self, replica: Replica, was_emptied: bool) -> None:
        if was_emptied:
            self.selection.index.forget(replica.number)
        if replica.state is not None:
            self.selection.index.set_capacity(replica.number, replica.state.total_blocks * replica.state.block_size)
        states = [each.state for each in self.replicas.all if each.state is not None]
        if len(states) == len(self.replicas):
            self.admission.set_capacity(sum(state.max_requests for state in states))
        self.replicas.changed()

    def _on_leave(self, replica: Replica) -> None:
        """What it is answering it may finish."""
        self.probes.stop(replica)
        replica.is_up = False
        replica.shared.finish()
        self.selection.index.forget(replica.number)

    # ---- one exchange ----------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, path = time.perf_counter(), scope["path"]
        exchange = Exchange(scope, receive, send)
        reply = Reply(exchange, path)
        status = 0
        try:
            if scope["method"] in ("GET", "HEAD") and await self._answered(path, reply):
                return
            status = await self._forward(scope, exchange, reply)
        except ClientGone:
            pass
        except RequestError as error:
            status = error.status
            await reply.fail(error)
        except Exception:
            logger.exception("A request failed")
            status = 500
            await reply.fail(InternalError())
        self.metrics.ended(status, time.perf_counter() - started)

    async def _answered(self, path: str, reply: Reply) -> bool:
        """Whether it was one of our own routes."""
        now = self._loop.time()
        if path in HEALTH:
            if self.replicas.available(now):
                await reply.respond(200, [(b"content-type", JSON)], b'{"ready":true}' if path != "/health" else b"")
            else:
                await reply.fail(NoReplica("no replica is ready"))
        elif path == "/livez":
            await reply.respond(200, [(b"content-type", JSON)], b'{"live":true}')
        elif path == "/metrics":
            await reply.respond(200, [(b"content-type", CONTENT_TYPE.encode())], self.metrics.render(now))
        elif path == "/replicas":
            await reply.respond(200, [(b"content-type", JSON)], msgspec.json.encode(self._describe(now)))
        else:
            return False
        return True

    def _describe(self, now: float) -> list[dict[str, object]]:
        return [
            {
                "url": str(replica.url),
                "available": replica.is_available(now),
                "draining": replica.is_draining,
                "active": replica.num_active,
                "requests": replica.num_requests,
                "losses": replica.num_losses,
                "state": replica.state,
            }
            for replica in self.replicas.all
        ]

    async def _forward(self, scope: Scope, exchange: Exchange, reply: Reply) -> int:
        path = scope["path"]
        if path.startswith(NOT_FORWARDED):
            raise NotFound(f"{path} is a route of a single server: send the request to the replica itself")
        body = await exchange.body(self._options.payload_limit)
        query = scope.get("query_string", b"")
        target = scope["raw_path"] + (b"?" + query if query else b"")
        client = scope.get("client")
        call = ClientCall.of(scope["method"], path, target, scope["headers"], client[0] if client else "", body)
        with exchange.client() as connection, self.admission.held(call.key):
            if path in BROADCAST:
                return await self._broadcast(call, reply)
            forwarding = Forwarding(
                call,
                reply,
                connection,
                self.replicas,
                self.selection,
                self.metrics,
                self._options.route_key,
                self._options.move_timeout,
            )
            await forwarding.run()
        if call.method == "POST" and forwarding.status == 200:  # pages and refusals need no key
            self.admission.accepted(call.key)
        return forwarding.status

    async def _broadcast(self, call: ClientCall, reply: Reply) -> int:
        """To every replica that is available. The answer is that of the first that does not agree, if one does not."""
        head, body = call.encode(None)
        answers = []
        for replica in self.replicas.available(self._loop.time()):
            try:
                answers.append(await replica.pool.exchange(head, body))
            except ReplicaLost as error:
                replica.lost(str(error))
                raise NoReplica(
                    f"{replica.url} was lost; other replicas may have made the change: retry the request"
                ) from None
        if not answers:
            raise NoReplica("no replica is ready")
        status, headers, content = next((each for each in answers if each[0] != 200), answers[0])
        await reply.respond(status, headers, content)
        return status
