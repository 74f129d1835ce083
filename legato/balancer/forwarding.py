"""Forwards one request: chooses a replica, sends the request, forwards the response; continues on another if it is
lost.

A client sees one answer. What a replica refuses (429, 503) or loses before anything went out is sent to another as it
was. A stream that was cut off goes on at another replica after the tokens that the client has got, if both know the
key (`ipc/routed.py`); else it ends with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from enum import Enum, auto

from legato.api.errors import GenerationFailed, RequestError, Unhealthy
from legato.balancer.answers import Headers, ReplicaAnswer, ReplicaLost
from legato.balancer.calls import ClientCall
from legato.balancer.metrics import RouteMetrics
from legato.balancer.replicas import Replica, ReplicaSet
from legato.balancer.replies import Reply
from legato.balancer.selection import Selection
from legato.http.exchange import ClientConnection
from legato.ipc.multiplexing import LONGEST_BODY, LinkedRequest
from legato.ipc.routed import FAILED, HEAD_HEADER, LAST, LOST, MARKED, MARKS_MORE

logger = logging.getLogger(__name__)

# Replicas that a request may lose: it may be what they die of.
MAX_LOSSES = 3
_head_header, _marked, _lost = HEAD_HEADER.encode(), MARKED.encode(), LOST.encode()
_RESPONSE_ID = re.compile(rb'"id":"(resp_[0-9a-f]+)"')
RESPONSES = "/v1/responses"


class Outcome(Enum):
    DONE = auto()
    # The replica does not take it; another may.
    REFUSED = auto()
    # The replica is lost, or ends.
    LOST = auto()


class NoReplica(Unhealthy):
    headers = {"retry-after": "1"}  # noqa: RUF012


class Forwarding:
    """Of one request."""

    def __init__(
        self,
        call: ClientCall,
        reply: Reply,
        client: ClientConnection,
        replicas: ReplicaSet,
        selection: Selection,
        metrics: RouteMetrics,
        route_key: str | None,
        patience: float,
    ) -> None:
        """`patience`: seconds to wait for a replica that can go on with what another has lost."""
        self._call = call
        self._reply = reply
        self._client = client
        self._replicas = replicas
        self._selection = selection
        self._metrics = metrics
        self._route_key = route_key
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._tried: set[Replica] = set()
        self._num_losses = 0
        self._refusal: tuple[int, Headers, bytes] | None = None
        self._is_ended = False
        # What a replica said when it could not go on.
        self._last_words = b""
        # Of the response that a replica stores, once it has said it.
        self._response_id = ""
        # Status of the answer; 0 before there is one.
        self.status = 0

    async def run(self) -> None:
        """ClientGone if the client hangs up."""
        deadline = 0.0
        while True:
            replica = self._selection.choose(self._call, self._tried)
            if replica is None:
                # Whoever comes when there is nobody is told so at once; whoever has lost its replica waits for another.
                now = self._loop.time()
                deadline = deadline or now + self._patience
                if not self._num_losses or now >= deadline:
                    await self._give_up()
                    return
                await self._replicas.wait_for_change(min(1.0, deadline - now))
                self._client.raise_if_gone()
                self._tried.clear()
                continue
            outcome = await self._try(replica)
            if outcome is Outcome.DONE:
                return
            self._tried.add(replica)
            self._metrics.retried()
            if self._num_losses > MAX_LOSSES:
                await self._reply.fail(GenerationFailed("the replicas that computed it were lost"))
                return

    async def _give_up(self) -> None:
        if self._refusal is not None and not self._reply.has_started:
            status, headers, body = self._refusal
            self.status = status
            await self._reply.respond(status, headers, body)
        elif self._last_words and self._reply.has_started:
            await self._reply.write(self._last_words)
            await self._reply.end()
        elif self._num_losses:
            await self._fail(GenerationFailed("its replica was lost, and no other is ready"))
        else:
            await self._fail(NoReplica("no replica is ready"))

    async def _fail(self, error: RequestError) -> None:
        self.status = self.status or error.status
        await self._reply.fail(error)

    # ---- one replica -----------------------------------------------------------------------------------------------

    async def _try(self, replica: Replica) -> Outcome:
        num_tokens = self._call.num_new_tokens
        replica.begin(num_tokens)
        is_pending = True
        answer: ReplicaAnswer | None = None
        try:
            answer = await self._sent(replica)
            replica.first_token(num_tokens)
            is_pending = False
            return await self._pass(replica, answer)
        except ReplicaLost as error:
            if self._is_ended:  # the answer was complete, and a client who has it may be gone
                await self._reply.end()
                return Outcome.DONE
            self._client.raise_if_gone()  # then it was we who broke the connection off
            if error.is_alive:  # it gave this stream up, of a client that does not read perhaps, and no other
                replica.probe_now.set()
            else:
                replica.lost(str(error))
            self._metrics.lost()
            self._num_losses += 1
            return await self._after_loss()
        finally:
            if is_pending:
                replica.first_token(num_tokens)
            replica.end()
            if answer is not None:
                self._client.when_gone(None)  # its connection may have another client's request next
                answer.release()

    async def _sent(self, replica: Replica) -> ReplicaAnswer:
        """The answer, its headers being here. What was sent on a connection that had been closed is sent again."""
        try:
            return await self._send(replica, fresh=False)
        except ReplicaLost as error:
            if not error.is_stale:
                raise
        return await self._send(replica, fresh=True)

    async def _send(self, replica: Replica, *, fresh: bool) -> ReplicaAnswer:
        call, key = self._call, self._route_key
        linked = replica.shared.begin() if call.generates and not fresh else None
        answer: ReplicaAnswer | None = linked
        try:
            if linked is not None:
                headers, body = call.parts(key)
                if len(body) <= LONGEST_BODY:
                    self._watch(linked)
                    await linked.send(LinkedRequest(call.method, call.target, headers), body)
                    return linked
                linked.release()
            answer = connection = await replica.pool.take(fresh=fresh)
            self._watch(connection)
            await connection.send(*call.encode(key))
            return connection
        except BaseException:
            if answer is not None:
                answer.release()
            raise

    def _watch(self, answer: ReplicaAnswer) -> None:
        """Nobody needs the answer when the client is gone."""
        self._client.when_gone(answer.abort)
        self._client.raise_if_gone()

    async def _after_loss(self) -> Outcome:
        """Something of the stream went out: it can only go on if it is known how much."""
        if self._reply.has_begun and not self._call.marks:
            await self._reply.fail(GenerationFailed("the replica was lost"))
            return Outcome.DONE
        if self._call.marks:
            self._metrics.moved()
        return Outcome.LOST

    async def _pass(self, replica: Replica, answer: ReplicaAnswer) -> Outcome:
        status, headers = answer.status, answer.headers
        replica.answered(status, self._loop.time())
        route = answer.header(_head_header)
        if status == 200 and (answer.header(b"content-type") or b"").startswith(b"text/event-stream"):
            self.status = status
            return await self._pass_events(replica, answer, is_marked=route == _marked)
        body = await answer.read_all()
        if status in (429, 503) or route == _lost or (status == 404 and self._is_elsewhere):
            if status != 404 or self._refusal is None:  # it may be the one that is too busy which has the response
                self._refusal = (status, headers, body)
            if route == _lost:
                self._num_losses += 1
            return Outcome.REFUSED
        if self._reply.has_started:  # of a stream that another replica cannot go on with
            await self._fail(GenerationFailed(f"its replica was lost, and another answered {status}"))
            return Outcome.DONE
        self.status = status
        self._remember(replica, body)
        await self._reply.respond(status, headers, body)
        return Outcome.DONE

    @property
    def _is_elsewhere(self) -> bool:
        """Whether a replica that does not know what is asked for says nothing about the others."""
        return self._call.path.startswith(RESPONSES)

    async def _pass_events(self, replica: Replica, answer: ReplicaAnswer, *, is_marked: bool) -> Outcome:
        marks, reply = self._call.marks, self._reply
        self._call.model = replica.model
        await reply.start(answer.status, answer.headers)
        is_first, self._last_words = True, b""
        while pieces := await answer.read():
            if is_first:
                is_first = False
                self._remember(replica, pieces[0])
                answer.sink = self._sink(is_marked=is_marked)
            if not is_marked:
                await reply.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
                continue
            if not all(b"\n" in piece for piece in pieces):
                raise ReplicaLost("a piece of the stream has no mark")
            data = []
            for piece in pieces:
                end = piece.index(b"\n") + 1
                kind = piece[1:2]
                if kind == FAILED:
                    self._last_words = piece[end:]
                    self._num_losses += 1
                    break
                marks.append(piece[: end - 1])
                data.append(piece[end:])
                self._is_ended = kind == LAST
            written = b"".join(data)
            if self._is_ended:
                await reply.end(written)
            elif written:
                await reply.write(written)
            if self._last_words:
                answer.abort()
                replica.probe_now.set()
                self._metrics.moved()
                return Outcome.LOST
        if is_marked and not self._is_ended:
            raise ReplicaLost("the stream ended early")
        await reply.end()
        return Outcome.DONE

    def _sink(self, *, is_marked: bool) -> Callable[[list[bytes]], bool] | None:
        """What passes most pieces on at once; it leaves ends, failures and slow clients to the loop above. It raises
        nothing: it runs where the pieces of all streams arrive."""
        write, marks = self._reply.write_at_once, self._call.marks
        if write is None:
            return None

        def take(pieces: list[bytes]) -> bool:
            if not is_marked:
                return write(b"".join(pieces))
            data, news = b"", []
            for piece in pieces:
                mark, newline, events = piece.partition(b"\n")
                if not newline or mark[:2] != MARKS_MORE:
                    return False
                data += events
                news.append(mark)
            if not write(data):
                return False
            marks.extend(news)
            return True

        return take

    def _remember(self, replica: Replica, data: bytes) -> None:
        """A response is stored where it ends: at the replica that the stream goes on at, which says no id again."""
        if self._call.path == RESPONSES and (found := _RESPONSE_ID.search(data[:4096])):
            self._response_id = found[1].decode()
        if self._response_id:
            self._selection.remember(self._response_id, replica)
