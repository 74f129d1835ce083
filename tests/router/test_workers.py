"""Scheduler and workers: what goes over the link, who pays when a worker dies, and what they count together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest

from legato.api.errors import Overloaded
from legato.common.errors import EndpointInUse, LegatoError
from legato.grammar.errors import GrammarError
from legato.http.remote_backend import HEARING_PER_TURN, RemoteBackend
from legato.http.turnstile import Turnstile
from legato.ipc import messages as say
from legato.ipc.link import Link, decoder_for
from legato.router.listening import KERNEL_SPREADS, Listeners
from legato.router.permits import PermitPool
from legato.router.port import Port
from legato.router.workers import Worker, WorkerFailed, Workers
from legato.scheduling.state import FinishReason, GenerationRequest, Grammar, GrammarKind, Output
from legato.telemetry.metrics import Metrics, add_up
from tests.http.asgi import LIMITS, FakeBackend, outputs_of, until
from tests.telemetry.test_metrics import samples


@dataclass
class Heard:
    """A sink."""

    outputs: list[Output] = field(default_factory=list)
    num_admissions: int = 0

    def admitted(self) -> None:
        self.num_admissions += 1

    def __call__(self, outputs: list[Output]) -> None:
        self.outputs += outputs


class Pair:
    """A worker's end and the scheduler's end of one link, in one process."""

    def __init__(self, backend: FakeBackend, permits: PermitPool) -> None:
        self.num_frames = 0
        to_worker, to_scheduler = decoder_for(say.ToWorker), decoder_for(say.ToScheduler)
        self._worker_link = Link(to_worker, self._to_worker, lambda: None)
        self.remote = RemoteBackend(LIMITS, self._worker_link.send)
        self._scheduler_link = Link(to_scheduler, self._to_scheduler, lambda: self.port.close())

        async def scrape() -> bytes:
            return b"all metrics"

        self.port = Port(backend, permits, scrape, self._scheduler_link.send)

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        await self._worker_link.open(ours)
        await self._scheduler_link.open(theirs)

    def die(self) -> None:
        self._worker_link.close()

    def _to_scheduler(self, message: say.Wish) -> None:
        self.port.receive(message)

    def _to_worker(self, message: say.ToWorker) -> None:
        if isinstance(message, say.Tokens):
            self.num_frames += 1
            self.remote.on_tokens(message)
        elif isinstance(message, say.Admitted):
            self.remote.on_admitted(message)
        elif isinstance(message, say.Answer):
            self.remote.on_answer(message)


def linked(test: Callable[[Pair, FakeBackend], object], permits: int = 4, **backend: object) -> None:
    async def main() -> None:
        fake = FakeBackend(**backend)  # type: ignore[arg-type]
        pair = Pair(fake, PermitPool(permits))
        await pair.open()
        await test(pair, fake)  # type: ignore[misc]

    asyncio.run(main())


def request(number: int) -> GenerationRequest:
    return GenerationRequest(number, [0, 5], 20, stop_token_ids=frozenset({7}))


WHOLE = [
    Output(5, -0.25, num_cached=3, prompt_logprobs=[None, -1.5], prompt_top_tokens=[None, [(3, -0.5)]]),
    Output(6, -0.5, top_tokens=[(6, -0.5), (7, -1.25)]),
    Output(7, -0.75),
    Output(8, -1.0, finish_reason=FinishReason.STOP_SEQUENCE),
]


def test_requests_and_all_that_outputs_have_survive_the_link() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        heard = Heard()
        pair.remote.submit(request(1 << 40), heard)
        await until(lambda: len(heard.outputs) == 4)
        assert heard.outputs == WHOLE
        assert heard.num_admissions == 1
        assert backend.requests == [request(1 << 40)]

    linked(test, script=lambda request: WHOLE)


def test_what_one_turn_has_for_a_worker_is_one_message() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        sinks = [Heard() for _ in range(50)]
        for number, sink in enumerate(sinks):
            pair.remote.submit(request(number), sink)
        await until(lambda: all(sink.outputs and sink.outputs[-1].finish_reason for sink in sinks))
        assert pair.num_frames <= len(outputs_of("hello world")) + 2

    linked(test)


def test_a_cancelled_request_is_cancelled_at_the_other_end_and_hears_nothing_more() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        heard = Heard()
        pair.remote.submit(request(3), heard)
        await until(lambda: len(heard.outputs) == 1)
        pair.remote.cancel(3)
        pair.remote.cancel(3)
        await until(lambda: backend.cancelled)
        backend.go_on.set()
        await asyncio.sleep(0.01)
        assert backend.cancelled == [3]
        assert len(heard.outputs) == 1

    linked(test, pause_after=1)


def test_permits_are_counted_at_the_other_end() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        await pair.remote.take(3)
        with pytest.raises(Overloaded) as refused:
            await pair.remote.take(2)
        assert refused.value.headers == {"retry-after": "1"}
        pair.remote.give_back(3)
        await pair.remote.take(4)

    linked(test)


def test_whoever_stops_waiting_for_a_permit_does_not_keep_it() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        asking = asyncio.create_task(pair.remote.take(4))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: pair.port._permits.free == 0)
        await until(lambda: pair.port._permits.free == 4)

    linked(test)


def test_a_dead_worker_gives_everything_back() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        await pair.remote.take(4)
        pair.remote.submit(request(1), Heard())
        pair.remote.submit(request(2), Heard())
        await until(lambda: len(backend.requests) == 2)
        pair.die()
        await until(lambda: backend.cancelled)
        assert sorted(backend.cancelled) == [1, 2]
        assert pair.port._permits.free == 4

    linked(test, pause_after=1)


def test_tokens_of_many_requests_are_told_in_slices_with_turns_for_others_in_between() -> None:
    async def main() -> None:
        remote = RemoteBackend(LIMITS, lambda message: None)
        sinks = [Heard() for _ in range(10 * HEARING_PER_TURN)]
        for number, sink in enumerate(sinks):
            remote.submit(request(number), sink)
        ids = list(range(len(sinks)))
        remote.on_tokens(say.Tokens(ids, [5] * len(ids), [-0.5] * len(ids), []))
        told = [0]
        while told[-1] < len(sinks):
            told.append(sum(bool(sink.outputs) for sink in sinks))
            assert len(told) < 50
            await asyncio.sleep(0)
        assert max(later - earlier for earlier, later in pairwise(told)) == HEARING_PER_TURN

    asyncio.run(main())


def test_tokens_that_wait_to_be_told_keep_their_order_and_the_end_is_last() -> None:
    async def main() -> None:
        remote = RemoteBackend(LIMITS, lambda message: None)
        sinks = [Heard() for _ in range(3 * HEARING_PER_TURN)]
        ids = list(range(len(sinks)))
        for number, sink in enumerate(sinks):
            remote.submit(request(number), sink)
        for token_id in range(4):
            remote.on_tokens(say.Tokens(ids, [token_id] * len(ids), [0.0] * len(ids), []))
        ends = [(place, Output(4, finish_reason=FinishReason.LENGTH)) for place in range(len(ids))]
        remote.on_tokens(say.Tokens(ids, [4] * len(ids), [0.0] * len(ids), ends))
        remote.cancel(len(sinks) - 1)
        await until(lambda: all(sink.outputs and sink.outputs[-1].finish_reason for sink in sinks[:-1]))
        for sink in sinks[:-1]:
            assert [output.token_id for output in sink.outputs] == [0, 1, 2, 3, 4]
        assert sinks[-1].outputs == [], "it was cancelled while its tokens waited"

    asyncio.run(main())


@pytest.mark.parametrize("error", [GrammarError("no such rule"), LegatoError("shard 0 is lost")])
def test_a_grammar_that_cannot_be_prepared_fails_with_the_same_error(error: Exception) -> None:
    class Refusing(FakeBackend):
        async def prepare(self, grammar: Grammar) -> None:
            raise error

    async def main() -> None:
        pair = Pair(Refusing(), PermitPool(1))
        await pair.open()
        with pytest.raises(type(error), match=str(error)):
            await pair.remote.prepare(Grammar(GrammarKind.REGEX, "a"))

    asyncio.run(main())


def test_health_and_metrics_are_asked_for_at_the_other_end() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        assert not await pair.remote.healthy()
        assert await pair.remote.scrape() == b"all metrics"

    linked(test, health=False)


def test_frames_may_come_in_pieces() -> None:
    async def main() -> None:
        arrived: list[say.ToScheduler] = []
        link = Link(decoder_for(say.ToScheduler), arrived.append, lambda: None)
        body = msgspec.msgpack.encode([say.Cancel(1), say.Cancel(2)])
        frame = len(body).to_bytes(4, "big") + body
        for byte in frame + frame:
            link.data_received(bytes([byte]))
        assert arrived == [say.Cancel(1), say.Cancel(2)] * 2

    asyncio.run(main())


def test_the_metrics_of_all_processes_add_up() -> None:
    scheduler, first, second = (Metrics(LIMITS) for _ in range(3))
    for metrics, count in ((first, 2), (second, 3)):
        for _ in range(count):
            metrics.request_arrived()
            metrics.request_validated(10, 20)
    second.request_failed("validation")
    found = samples(scheduler.render(add_up([first.figures(), second.figures()])))
    assert found["tgi_request_count"] == 5
    assert found['tgi_request_failure{err="validation"}'] == 1
    assert found["tgi_request_input_length_sum"] == 50
    assert found['tgi_request_input_length_bucket{le="+Inf"}'] == 5
    assert found["tgi_batch_max_total_tokens"] == LIMITS.max_batch_total_tokens, "a gauge is not added up"


def test_few_requests_begin_in_one_turn_and_in_order() -> None:
    async def main() -> None:
        turnstile, begun = Turnstile(per_turn=3), list[int]()

        async def begin(number: int) -> None:
            await turnstile.enter()
            begun.append(number)

        tasks = [asyncio.create_task(begin(number)) for number in range(10)]
        tasks[5].cancel()
        most = 0
        while len(begun) < 9:
            before = len(begun)
            await asyncio.sleep(0)
            most = max(most, len(begun) - before)
        assert most <= 3
        assert begun == [0, 1, 2, 3, 4, 6, 7, 8, 9]

    asyncio.run(main())


# ---- the port --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 3])
def test_a_port_that_somebody_listens_on_is_refused(num: int) -> None:
    first = Listeners("127.0.0.1", 0, num)
    first.listen()
    with pytest.raises(EndpointInUse, match="--port"):
        Listeners("127.0.0.1", first.port, num)
    first.close()


@pytest.mark.parametrize("num", [1, 3])
def test_of_two_that_bound_a_port_the_second_to_listen_learns_of_the_first(num: int) -> None:
    first = Listeners("127.0.0.1", 0, num)
    second = Listeners("127.0.0.1", first.port, num)
    first.listen()
    with pytest.raises(EndpointInUse, match="--port"):
        second.listen()
    first.close()
    second.close()


@pytest.mark.skipif(not KERNEL_SPREADS, reason="the kernel does not spread connections")
def test_each_worker_has_a_socket_of_its_own() -> None:
    listeners = Listeners("127.0.0.1", 0, 3)
    assert len({listener.fileno() for listener in listeners.sockets}) == 3
    assert len({listener.getsockname() for listener in listeners.sockets}) == 1
    listeners.close()


# ---- processes -------------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_load_says_why(tmp_path: object) -> None:
    async def main() -> None:
        listeners = Listeners("127.0.0.1", 0, 1)
        workers = Workers(say.Setup("info", True, f"{tmp_path}/nothing", None, 1000), listeners.sockets)
        try:
            with pytest.raises(WorkerFailed, match="nothing: no such folder"):
                await workers.load()
        finally:
            workers.kill()
            listeners.close()

    asyncio.run(main())


def loading(test: Callable[[Worker], Awaitable[None]]) -> None:
    """A worker that waits for its first message."""

    async def main() -> None:
        listeners = Listeners("127.0.0.1", 0, 1)
        worker = Worker(0, listeners.sockets[0])
        await worker._link.open(worker._connection)
        try:
            await asyncio.wait_for(test(worker), 10)
        finally:
            worker.kill()
            listeners.close()

    asyncio.run(main())


def test_a_worker_that_still_loads_has_counted_nothing() -> None:
    async def test(worker: Worker) -> None:
        await worker.report()
        assert worker.figures == {}
        assert not worker.lost.is_set()

    loading(test)


def test_a_worker_that_still_loads_ends_at_once_when_all_do() -> None:
    async def test(worker: Worker) -> None:
        worker.drain()
        assert await worker.exit() == "HTTP worker 0 exited with code 0"

    loading(test)


def test_a_worker_ends_when_its_scheduler_is_gone() -> None:
    async def main() -> None:
        listeners = Listeners("127.0.0.1", 0, 1)
        worker = Worker(0, listeners.sockets[0])
        await worker.load(say.Setup("info", True, "nothing", None, 1000))
        worker._link.close()
        assert await asyncio.wait_for(worker.exit(), 10)
        listeners.close()

    asyncio.run(main())
