"""Which replica gets a request: by what it holds and by what it has to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from legato.balancer.calls import ClientCall
from legato.balancer.choosing import DECODE_COST, Load, cheapest
from legato.balancer.prefixes import CHUNK, TOKENS_PER_CHUNK, PrefixIndex, chain_of
from legato.balancer.replicas import MAX_ERRORS, Replica, ReplicaSet, ReplicaUrl
from legato.balancer.selection import Selection
from legato.common.errors import OptionError
from legato.ipc.routed import ReplicaState

LONG = "x" * 4000


def state(**changes: Any) -> ReplicaState:
    found = dict(ready=True, draining=False, model_id="m", model_sha=None, version="1", epoch="a", running=0, queued=0)
    found |= dict(max_rows=8, max_requests=100, free_blocks=90, total_blocks=100, block_size=16)
    return ReplicaState(**found | changes)


def chat(*texts: str, key: str = "k", **fields: Any) -> ClientCall:
    messages = [{"role": "user", "content": text} for text in texts]
    body = json.dumps(fields | {"messages": messages}).encode()
    path = "/v1/chat/completions"
    return ClientCall.of("POST", path, path.encode(), [(b"authorization", key.encode())], "", body)


def with_replicas(num: int, test: Callable[[Selection, list[Replica]], None], policy: Any = "prefix") -> None:
    async def main() -> None:
        replicas = ReplicaSet(None)
        replicas.update([ReplicaUrl("h", port) for port in range(1, num + 1)])
        for replica in replicas.all:
            replica.found(state(), healthy=True)
        test(Selection(replicas, policy), replicas.all)

    asyncio.run(main())


def chosen(selection: Selection, call: ClientCall) -> Replica:
    replica = selection.choose(call, ())
    assert replica is not None
    return replica


# ---- the index -------------------------------------------------------------------------------------------------------


def test_a_prefix_matches_as_far_as_it_is_the_same() -> None:
    index = PrefixIndex()
    index.add(0, chain_of(b"", b"a" * CHUNK + b"b" * CHUNK + b"c" * CHUNK))
    index.add(5, chain_of(b"", b"a" * CHUNK))
    assert index.match(chain_of(b"", b"a" * CHUNK + b"b" * CHUNK + b"x" * CHUNK)) == {0: 2, 5: 1}
    assert index.match(chain_of(b"", b"a" * CHUNK)) == {0: 1, 5: 1}
    assert index.match(chain_of(b"another key", b"a" * CHUNK)) == {}
    assert index.match(chain_of(b"", b"b" * CHUNK)) == {} and index.match([]) == {}


def test_what_was_used_least_recently_is_forgotten_first_and_leaves_before_roots() -> None:
    index = PrefixIndex()
    index.set_capacity(0, 3 * TOKENS_PER_CHUNK)
    first = chain_of(b"", b"a" * CHUNK + b"b" * CHUNK)
    index.add(0, first)
    index.add(0, chain_of(b"", b"c" * 2 * CHUNK))
    assert index.num_chunks(0) == 3 and index.match(first) == {0: 1}
    index.forget(0)
    assert index.num_chunks(0) == 0 and index.match(first) == {} and not index._holders


# ---- the cost --------------------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_worth_its_tokens_and_no_more() -> None:
    busy = Load(num_requests=10)
    assert cheapest([Load(), busy], 1000, [0, 10 * DECODE_COST + 1]) == 1
    assert cheapest([Load(), busy], 1000, [0, 10 * DECODE_COST - 1]) == 0


def test_a_replica_without_a_free_row_waits_longer_than_a_prompt_takes() -> None:
    assert cheapest([Load(num_requests=7, max_rows=8), Load(num_requests=8, max_rows=8)], 1000, [0, 1000]) == 0


def test_prompts_that_wait_count() -> None:
    assert cheapest([Load(pending_tokens=500), Load(num_requests=3)], 100, [0, 0]) == 1


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_the_turns_of_a_conversation_stay_together_and_others_spread() -> None:
    def test(selection: Selection, replicas: list[Replica]) -> None:
        places = []
        for number in range(4):
            first = chosen(selection, chat(f"{number}{LONG}"))
            first.begin(0)
            places.append(first)
            again = chat(f"{number}{LONG}", "answer", "question", max_tokens=number)
            assert chosen(selection, again) is first
        assert len(set(places)) == 4

    with_replicas(4, test)


def test_another_key_finds_nothing() -> None:
    def test(selection: Selection, replicas: list[Replica]) -> None:
        first = chosen(selection, chat(LONG))
        first.begin(0)
        assert chosen(selection, chat(LONG)) is first
        assert chosen(selection, chat(LONG, key="other")) is not first

    with_replicas(2, test)


def test_draining_lost_and_tried_replicas_get_nothing() -> None:
    def test(selection: Selection, replicas: list[Replica]) -> None:
        first, second, third = replicas
        first.found(state(draining=True, ready=False), healthy=True)
        second.lost("gone")
        assert chosen(selection, chat("hi")) is third
        assert selection.choose(chat("hi"), {third}) is None
        second.found(state(), healthy=True)
        assert selection.choose(chat("hi"), {third}) is second

    with_replicas(3, test)


def test_errors_in_a_row_open_the_circuit_and_time_closes_it() -> None:
    def test(selection: Selection, replicas: list[Replica]) -> None:
        (replica,) = replicas
        for _ in range(MAX_ERRORS - 1):
            replica.answered(500, 100.0)
        replica.answered(200, 100.0)
        assert replica.is_available(100.0)
        for _ in range(MAX_ERRORS):
            replica.answered(500, 100.0)
        assert not replica.is_available(100.5) and replica.is_available(101.5)
        for _ in range(MAX_ERRORS):
            replica.answered(502, 102.0)
        assert not replica.is_available(103.5) and replica.is_available(104.5)

    with_replicas(1, test)


def test_requests_of_other_balancers_count() -> None:
    def test(selection: Selection, replicas: list[Replica]) -> None:
        replicas[0].begin(0)
        replicas[0].found(state(running=5, queued=2), healthy=True)
        assert replicas[0].load.num_requests == 7
        assert all(chosen(selection, chat("hi")) is replicas[1] for _ in range(4))

    with_replicas(2, test)


def test_a_cache_that_was_emptied_is_noticed() -> None:
    def test(selection: Selection, replicas: list[Replica]) -> None:
        assert not replicas[0].found(state(), healthy=True)
        assert replicas[0].found(state(epoch="b"), healthy=True)

    with_replicas(1, test)


def test_a_stored_response_is_looked_for_where_it_is() -> None:
    def test(selection: Selection, replicas: list[Replica]) -> None:
        selection.remember("resp_1", replicas[2])
        path = b"/v1/responses/resp_1/cancel"
        assert chosen(selection, ClientCall.of("POST", path.decode(), path, [], "", b"")) is replicas[2]
        body = b'{"input": "more", "previous_response_id": "resp_1"}'
        assert chosen(selection, ClientCall.of("POST", "/v1/responses", b"", [], "", body)) is replicas[2]

    with_replicas(3, test)


def test_a_stored_response_is_looked_for_nowhere_else_while_its_replica_is_there() -> None:
    """Others would say that there is no such response, and its client would believe them."""

    def test(selection: Selection, replicas: list[Replica]) -> None:
        selection.remember("resp_1", replicas[0])
        call = ClientCall.of("GET", "/v1/responses/resp_1", b"", [], "", b"")
        replicas[0].is_draining = True
        assert chosen(selection, call) is replicas[0]
        assert selection.choose(call, {replicas[0]}) is None
        replicas[0].lost("gone")
        assert selection.choose(call, ()) is None
        selection._replicas.update([replica.url for replica in replicas[1:]])
        assert chosen(selection, call) in replicas[1:]

    with_replicas(3, test)


def test_replicas_come_and_go() -> None:
    async def main() -> None:
        replicas = ReplicaSet(None)
        left: list[Replica] = []
        replicas.on_leave = left.append
        urls = [ReplicaUrl("h", port) for port in range(3)]
        replicas.update(urls)
        replicas.update([urls[0], urls[2]])
        assert [replica.number for replica in left] == [1]
        replicas.update([*urls, ReplicaUrl("new", 1)])
        assert sorted(replica.number for replica in replicas.all) == [0, 1, 2, 3]

    asyncio.run(main())


@pytest.mark.parametrize("url", ["ftp://h:1", "http://", "http://h:port", "http://h:1/path", "http://u@h:1"])
def test_urls_that_are_no_replicas_are_refused(url: str) -> None:
    with pytest.raises(OptionError, match="--replica"):
        ReplicaUrl.parse(url)


def test_what_clients_say_about_routing_is_not_passed_on() -> None:
    headers = [(b"x-legato-route-key", b"guess"), (b"x-legato-route", b"{}"), (b"connection", b"close"), (b"a", b"b")]
    head, body = ClientCall.of("POST", "/generate", b"/generate?x=1", headers, "1.2.3.4", b"{}").encode(None)
    assert head == b"POST /generate?x=1 HTTP/1.1\r\na: b\r\nx-forwarded-for: 1.2.3.4\r\ncontent-length: 2\r\n\r\n"
    assert body == b"{}"


def test_what_waits_at_a_replica_is_what_it_has_to_compute() -> None:
    async def main() -> None:
        replicas = ReplicaSet(None)
        replicas.update([ReplicaUrl("a", 1), ReplicaUrl("b", 1)])
        for replica in replicas.all:
            replica.found(state(), healthy=True)
        selection = Selection(replicas, "prefix")
        body = b'{"inputs": "%b"}' % (b"word " * 1000)
        call = ClientCall.of("POST", "/generate", b"/generate", [], "", body)
        first = selection.choose(call, ())
        assert call.num_new_tokens == call.num_tokens > 1000
        assert selection.choose(call, ()) is first
        assert call.num_new_tokens < TOKENS_PER_CHUNK, "the rest is in its cache"

    asyncio.run(main())
