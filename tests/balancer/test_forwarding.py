"""One request through the balancer: to replicas that do as they are told, on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import msgspec
import pytest

from legato.api.errors import Overloaded
from legato.balancer.admission import KeyShares
from legato.balancer.app import Balancer
from legato.balancer.discovery import DnsDiscovery, discovery_of
from legato.balancer.options import RouteOptions
from legato.balancer.replicas import ReplicaSet, ReplicaUrl
from legato.common.errors import OptionError
from legato.ipc.routed import HEAD_HEADER, RouteHead, decode_sent
from tests.balancer.test_choice import state
from tests.http.asgi import Answer, Call, until

KEY = "a-key-of-the-cluster"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
MARKS = EVENTS + b"x-legato-route: marks\r\n\r\n"
END = b"0\r\n\r\n"
# What one replica says to a request: bytes, and then it hangs up unless the last is None.
Script = list[bytes | None]


def whole(status: str, body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status.encode(), headers, len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class FakeReplica:
    """Answers each request with the next script, and the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.heads: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.num_connections = 0

    async def start(self) -> ReplicaUrl:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return ReplicaUrl("127.0.0.1", server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
                headers = dict(line.split(": ", 1) for line in head)
                self.heads.append(headers)
                self.bodies.append(await reader.readexactly(int(headers.get("content-length", 0))))
                script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
                for data in script:
                    if data is not None:
                        writer.write(data)
                        await writer.drain()
                if not script or script[-1] is not None:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    @property
    def sent(self) -> list[list[int]]:
        """The tokens in front of the last body, of each choice."""
        head = msgspec.json.decode(self.heads[-1][HEAD_HEADER], type=RouteHead)
        return [each.token_ids for each in decode_sent(self.bodies[-1][: head.resume])] if head.resume else []


def through(
    replicas: list[FakeReplica], test: Callable[[Balancer], Awaitable[None]], key: str | None = KEY, **options: Any
) -> None:
    async def main() -> None:
        urls = [await replica.start() for replica in replicas]
        known = ReplicaSet(None)
        known.update(urls)
        found = RouteOptions(
            replica=("http://h:1",), route_key=key, policy="round-robin", **{"move_timeout": 0.2} | options
        )
        balancer = Balancer(found, known)
        for replica in known.all:
            replica.found(state(resumes=key is not None), healthy=True)
        await test(balancer)

    asyncio.run(main())


async def ask(balancer: Balancer, path: str = "/generate_stream", headers: dict[str, str] | None = None) -> Answer:
    return await Call(balancer, "POST", path, [b'{"inputs": "hi"}'], headers).answer()


OK = whole("200 OK", b'{"generated_text": "x"}', b"content-type: application/json\r\nx-total-time: 5\r\n")
BUSY = whole("429 Too Many Requests", b'{"error": "busy"}', b"retry-after: 7\r\n")


def test_an_answer_is_passed_on_as_it_is() -> None:
    replica = FakeReplica([OK, None])

    async def test(balancer: Balancer) -> None:
        answer = await ask(balancer, "/generate")
        assert answer.status == 200 and answer.body == b'{"generated_text": "x"}'
        assert answer.headers["x-total-time"] == "5" and "date" not in answer.headers
        assert replica.bodies == [b'{"inputs": "hi"}']
        await ask(balancer, "/generate")
        assert replica.num_connections == 1, "the connection is used again"

    through([replica], test)


@pytest.mark.parametrize(
    ("method", "answer", "length"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 356\r\n\r\n", "356"),
        ("OPTIONS", b"HTTP/1.1 204 No Content\r\nallow: POST\r\n\r\n", None),
        ("GET", b"HTTP/1.1 304 Not Modified\r\n\r\n", None),
        ("GET", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", "2"),
    ],
)
def test_an_answer_says_the_length_that_the_replica_says(method: str, answer: bytes, length: str | None) -> None:
    async def test(balancer: Balancer) -> None:
        found = await Call(balancer, method, "/info").answer()
        assert found.headers.get("content-length") == length

    through([FakeReplica([answer, None])], test)


def test_a_request_that_one_replica_refuses_goes_to_another() -> None:
    first, second = FakeReplica([BUSY, None]), FakeReplica([OK, None])

    async def test(balancer: Balancer) -> None:
        assert [(await ask(balancer, "/generate")).status for _ in range(4)] == [200] * 4
        assert first.heads and len(second.heads) == 4

    through([first, second], test)


def test_a_stored_response_is_not_missing_because_its_replica_is_busy() -> None:
    """The replica that has it is not known to a balancer that has been started again."""
    busy, other = FakeReplica([BUSY, None]), FakeReplica([whole("404 Not Found", b"no such response"), None])

    async def test(balancer: Balancer) -> None:
        for _ in range(2):
            assert (await Call(balancer, "GET", "/v1/responses/resp_1").answer()).status == 429

    through([busy, other], test)


def test_a_request_that_all_refuse_is_refused() -> None:
    async def test(balancer: Balancer) -> None:
        answer = await ask(balancer)
        assert (answer.status, answer.headers["retry-after"], answer.body) == (429, "7", b'{"error": "busy"}')

    through([FakeReplica([BUSY, None]), FakeReplica([BUSY, None])], test)


def test_a_replica_that_dies_before_it_answers_is_replaced() -> None:
    dead, alive = FakeReplica([b"HTTP/1.1 200 OK\r\ncontent-le"]), FakeReplica([OK, None])

    async def test(balancer: Balancer) -> None:
        assert [(await ask(balancer, "/generate")).status for _ in range(3)] == [200] * 3
        assert len(dead.heads) == 1, "it gets nothing until a probe finds it well"

    through([dead, alive], test)


def test_half_of_a_body_is_not_passed_on() -> None:
    dead, alive = FakeReplica([OK[:-5]]), FakeReplica([OK, None])

    async def test(balancer: Balancer) -> None:
        assert (await ask(balancer, "/generate")).body == b'{"generated_text": "x"}'

    through([dead, alive], test)


def test_a_connection_that_was_closed_meanwhile_costs_nothing() -> None:
    replica = FakeReplica([OK], [OK, None])

    async def test(balancer: Balancer) -> None:
        assert (await ask(balancer, "/generate")).status == 200
        await asyncio.sleep(0.01)
        assert (await ask(balancer, "/generate")).status == 200
        assert balancer.replicas.all[0].num_losses == 0

    through([replica], test)


def test_a_stream_goes_on_elsewhere_after_what_was_passed_on() -> None:
    cut = [MARKS, chunk(b":+0=11\ndata: a\n\n"), chunk(b":+0=12,13\ndata: b\n\n") + chunk(b":+0=14\ndata: c\n\n")[:9]]
    rest = [MARKS, chunk(b":+0=14\ndata: c\n\n"), chunk(b":+\n"), chunk(b":.0=15/length\ndata: d\n\n"), END, None]
    first, second = FakeReplica(cut), FakeReplica(rest)

    async def test(balancer: Balancer) -> None:
        answer = await ask(balancer)
        assert answer.status == 200 and answer.body == b"data: a\n\ndata: b\n\ndata: c\n\ndata: d\n\n"
        assert HEAD_HEADER not in answer.headers
        assert second.sent == [[11, 12, 13]] and second.bodies[0].endswith(b'{"inputs": "hi"}')
        heads = [json.loads(replica.heads[0][HEAD_HEADER]) for replica in (first, second)]
        assert heads[0]["id"] == heads[1]["id"] and heads[0]["created"] == heads[1]["created"]

    through([first, second], test)


def test_a_stored_response_is_looked_for_where_its_stream_ended() -> None:
    created = b'data: {"type":"response.created","response":{"id":"resp_0a","status":"in_progress"}}\n\n'
    cut = [MARKS, chunk(b":+\n" + created), chunk(b":+0=11\ndata: a\n\n")]
    first = FakeReplica(cut)
    second = FakeReplica([MARKS, chunk(b":.0=12\ndata: b\n\n"), END, None], [OK, None])

    async def test(balancer: Balancer) -> None:
        assert (await ask(balancer, "/v1/responses")).body == created + b"data: a\n\ndata: b\n\n"
        balancer.replicas.all[0].is_up = True
        for _ in range(2):
            assert (await Call(balancer, "GET", "/v1/responses/resp_0a").answer()).status == 200
        assert (len(first.heads), len(second.heads)) == (1, 3)

    through([first, second], test)


def test_a_replica_that_stops_hands_its_streams_over() -> None:
    stopping = [MARKS, chunk(b":+0=11\ndata: a\n\n"), chunk(b":!\ndata: error\n\n"), END, None]
    first = FakeReplica(stopping)
    second = FakeReplica([MARKS, chunk(b":.0=12\ndata: b\n\n"), END, None])

    async def test(balancer: Balancer) -> None:
        assert (await ask(balancer)).body == b"data: a\n\ndata: b\n\n"
        assert second.sent == [[11]]

    through([first, second], test)


def test_without_another_replica_the_last_words_of_the_first_are_passed_on() -> None:
    stopping = [MARKS, chunk(b":+0=11\ndata: a\n\n"), chunk(b":!\ndata: error\n\n"), END, None]

    async def test(balancer: Balancer) -> None:
        balancer.replicas.all[0].is_draining = False
        task = asyncio.create_task(ask(balancer))
        await until(lambda: balancer.replicas.all[0].num_active == 0 and balancer.replicas.all[0].num_requests)
        balancer.replicas.all[0].is_draining = True
        assert (await task).body == b"data: a\n\ndata: error\n\n"

    through([FakeReplica(stopping)], test)


def test_a_stream_whose_end_was_passed_on_is_complete() -> None:
    cut = [MARKS, chunk(b":.0=11/length\ndata: a\n\n")]

    async def test(balancer: Balancer) -> None:
        assert (await ask(balancer)).body == b"data: a\n\n"

    through([FakeReplica(cut), FakeReplica([BUSY, None])], test)


def test_a_client_who_hangs_up_with_the_end_of_a_stream_has_got_it() -> None:
    """The end of the replica's own answer may come a moment later."""

    async def test(balancer: Balancer) -> None:
        call = Call(balancer, "POST", "/generate_stream", [b"{}"])
        await call.wait_for(2)
        call.hang_up()
        assert (await call.answer()).body == b"data: a\n\n"
        assert b'outcome="answered"} 1' in balancer.metrics.render(0.0)

    through([FakeReplica([MARKS, chunk(b":.0=11/length\ndata: a\n\n"), None])], test)


@pytest.mark.parametrize(("path", "word"), [("/generate_stream", "generation"), ("/v1/chat/completions", "generation")])
def test_a_stream_without_marks_that_was_cut_ends_with_an_error_and_is_not_doubled(path: str, word: str) -> None:
    cut = [EVENTS + b"\r\n", chunk(b"data: a\n\n")]
    second = FakeReplica([EVENTS + b"\r\n", chunk(b"data: a\n\n"), END, None])

    async def test(balancer: Balancer) -> None:
        answer = await ask(balancer, path)
        event, error = answer.body.split(b"\n\n")[:2]
        assert event == b"data: a" and json.loads(error[6:])["error_type"] == word
        assert second.heads == []

    through([FakeReplica(cut), second], test, key=None)


def test_a_request_that_loses_every_replica_is_not_sent_for_ever() -> None:
    replicas = [FakeReplica([MARKS, chunk(b":+0=11\ndata: a\n\n")]) for _ in range(6)]

    async def test(balancer: Balancer) -> None:
        answer = await ask(balancer)
        assert b'"error_type":"generation"' in answer.body
        assert sum(len(replica.heads) for replica in replicas) == 4

    through(replicas, test)


def test_without_a_replica_clients_are_told_to_come_back() -> None:
    async def test(balancer: Balancer) -> None:
        balancer.replicas.all[0].lost("gone")
        answer = await ask(balancer, "/v1/completions")
        assert answer.status == 503 and answer.headers["retry-after"] == "1"

    through([FakeReplica([OK, None])], test)


def test_a_client_that_hangs_up_takes_its_request_with_it() -> None:
    replica = FakeReplica([MARKS, chunk(b":+0=11\ndata: a\n\n"), None])

    async def test(balancer: Balancer) -> None:
        call = Call(balancer, "POST", "/generate_stream", [b"{}"])
        await call.wait_for(2)
        call.hang_up()
        await asyncio.wait_for(call.task, 5)
        assert balancer.replicas.all[0].num_active == 0 and balancer.replicas.all[0].num_losses == 0

    through([replica], test)


def test_a_client_that_hangs_up_leaves_the_connection_of_a_replica_that_refused_it_to_others() -> None:
    """It may be in use for another client by then."""
    replica = FakeReplica([BUSY, None], [OK, None])

    async def test(balancer: Balancer) -> None:
        _, second = balancer.replicas.all
        connecting = asyncio.Event()

        async def never(*, fresh: bool = False) -> Any:
            connecting.set()
            await asyncio.Event().wait()

        second.pool.take = never  # type: ignore[method-assign]
        call = Call(balancer, "POST", "/generate", [b"{}"])
        await connecting.wait()
        call.hang_up()
        await asyncio.sleep(0.01)
        second.is_up = False
        assert (await ask(balancer, "/generate")).status == 200
        assert replica.num_connections == 1
        call.task.cancel()

    through([replica, FakeReplica([OK, None])], test)


def test_a_stream_does_not_go_on_with_another_model() -> None:
    """Its tokens would be other words. A replica may come back with another model, or be a newer version's."""
    cut = [MARKS, chunk(b":+0=11\ndata: a\n\n")]
    rest = [MARKS, chunk(b":.0=12/length\ndata: b\n\n"), END, None]
    other, same = FakeReplica(rest), FakeReplica(rest)

    async def test(balancer: Balancer) -> None:
        balancer.replicas.all[1].found(state(resumes=True, model_id="other"), healthy=True)
        assert (await ask(balancer)).body == b"data: a\n\ndata: b\n\n"
        assert (other.heads, len(same.heads)) == ([], 1)
        balancer.replicas.all[2].found(state(resumes=True, model_sha="newer"), healthy=True)
        balancer.replicas.all[0].is_up = True
        balancer.selection._turns = count()
        assert b'"error_type":"generation"' in (await ask(balancer)).body

    through([FakeReplica(cut), other, same], test)


# ---- who may have how much -------------------------------------------------------------------------------------------


def test_one_key_cannot_take_all_places_of_all_replicas() -> None:
    admission = KeyShares(None)
    admission.set_capacity(100)
    for key in (b"greedy", b"modest"):
        admission.accepted(key)
    held = [admission.held(b"greedy") for _ in range(100)]
    taken = 0
    with pytest.raises(Overloaded):
        for each in held:
            each.__enter__()
            taken += 1
    assert 70 < taken < 90
    with admission.held(b"modest"):
        pass
    held[0].__exit__(None, None, None)
    admission.set_capacity(200)
    with admission.held(b"greedy"):
        pass


def test_a_key_is_known_when_a_replica_has_worked_for_it() -> None:
    """Pages, preflights and refusals have no need of a valid one, and made-up keys must not push real ones out."""

    async def test(balancer: Balancer) -> None:
        known = balancer.admission._known
        for method, path in (("GET", "/ui"), ("OPTIONS", "/generate")):
            await Call(balancer, method, path, headers={"authorization": "Bearer made-up"}).answer()
        balancer.replicas.all[0].is_up = False
        assert (await ask(balancer, headers={"authorization": "Bearer made-up"})).status == 503
        assert not known
        balancer.replicas.all[0].is_up = True
        for name, value in (("authorization", "Bearer k"), ("authorization", "bearer   k "), ("x-api-key", "k")):
            assert (await ask(balancer, "/generate", {name: value})).status == 200
        assert list(known) == [b"k"]
        for number in range(5):
            await ask(balancer, "/generate", {"authorization": "Bearer k", "x-api-key": f"junk{number}"})
        assert len(known) == 2, "those who show several keys are one client"

    through([FakeReplica([OK, None])], test)


@pytest.mark.parametrize("spec", ["dns:name", "dns::80", "dns:name:port", "srv:name:80", "dns:name:99999"])
def test_what_cannot_be_discovered_is_refused(spec: str) -> None:
    with pytest.raises(OptionError, match="expected dns:NAME:PORT"):
        discovery_of(spec)


def test_every_address_of_a_name_is_a_replica() -> None:
    assert ReplicaUrl("127.0.0.1", 81) in asyncio.run(DnsDiscovery("dns:localhost:81").resolve())


def test_replicas_are_named_one_way() -> None:
    with pytest.raises(OptionError, match="either --replica"):
        RouteOptions()


# ---- probes ----------------------------------------------------------------------------------------------------------


def test_streams_of_a_replica_that_hangs_go_on_elsewhere() -> None:
    hung = FakeReplica([MARKS, chunk(b":+0=11\ndata: a\n\n"), None])
    alive = FakeReplica([MARKS, chunk(b":.0=12\ndata: b\n\n"), END, None])

    async def test(balancer: Balancer) -> None:
        call = Call(balancer, "POST", "/generate_stream", [b"{}"])
        await call.wait_for(2)
        balancer.replicas.all[0].hung("no answer to a probe")
        assert (await call.answer()).body == b"data: a\n\ndata: b\n\n"

    through([hung, alive], test)


STATE = whole("200 OK", msgspec.json.encode(state(epoch="b", max_requests=7)))
GONE, SICK = whole("404 Not Found", b""), whole("503 Service Unavailable", b"")
FINE = whole("200 OK", b"")


@pytest.mark.parametrize(
    ("scripts", "is_up", "has_state"),
    [
        ([[STATE]], True, True),
        ([[GONE], [FINE]], True, False),  # a server of another kind
        ([[GONE], [SICK]], False, False),
        ([[SICK]], False, True),  # its workers are being replaced
        ([[b"no HTTP"]], False, True),
        ([[whole("200 OK", b"{}")]], False, True),
        ([[]], False, True),
    ],
)
def test_what_a_probe_finds(scripts: list[Script], is_up: bool, has_state: bool) -> None:
    async def test(balancer: Balancer) -> None:
        (replica,) = balancer.replicas.all
        await balancer.probes._probe(replica)
        assert (replica.is_up, replica.state is not None) == (is_up, has_state)
        assert balancer.admission._shares.total == (7 if scripts == [[STATE]] else balancer.admission._shares.total)

    through([FakeReplica(*scripts)], test)


def test_a_probe_without_an_answer_ends_what_waits_for_the_replica() -> None:
    async def test(balancer: Balancer) -> None:
        (replica,) = balancer.replicas.all
        task = asyncio.create_task(ask(balancer))
        await until(lambda: replica.num_active)
        await balancer.probes._probe(replica)
        assert not replica.is_up
        assert (await task).status == 424

    through([FakeReplica([None])], test, probe_timeout=0.1)
