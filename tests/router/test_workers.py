"""Scheduler and workers: what goes over the link, who pays when a worker dies, and what they count together."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest

from legato.common import restarts
from legato.common.errors import EndpointInUse, LegatoError
from legato.common.restarts import TooManyRestarts
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar, GrammarKind
from legato.http.scheduler import DELIVERIES_PER_TURN, NO_STATE, STATE_SECONDS, SchedulerClient
from legato.http.throttle import AcceptThrottle
from legato.http.worker import HttpWorker
from legato.ipc import messages as msg
from legato.ipc.link import Link, decoder_for
from legato.router import workers as router_workers
from legato.router.adapters import AdapterRegistry
from legato.router.listening import KERNEL_SPREADS, Listeners
from legato.router.port import Port
from legato.router.workers import MAX_UNREAD, WorkerFailed, WorkerProcess, Workers
from legato.scheduling.state import FinishReason, GenerationRequest, Output
from legato.telemetry.metrics import Metrics, add_up
from tests.http.asgi import LIMITS, SETTINGS, FakeBackend, outputs_of, until
from tests.telemetry.test_metrics import samples


@dataclass
class Received:
    """The outputs of one request."""

    outputs: list[Output] = field(default_factory=list)

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)


class FakeStepLoop(FakeBackend):
    def submit(self, request: GenerationRequest, port: Port) -> None:  # type: ignore[override]
        super().submit(request, lambda output: port.put(request.id, output))


class Pair:
    """A worker's end and the scheduler's end of one link, in one process."""

    def __init__(self, steps: FakeStepLoop) -> None:
        self.num_frames = 0
        to_worker, to_scheduler = decoder_for(msg.ToWorker), decoder_for(msg.ToScheduler)
        self._worker_link = Link(to_worker, self._to_worker, lambda: None)
        self.client = SchedulerClient(LIMITS, self._worker_link.send)
        self._scheduler_link = Link(to_scheduler, self._to_scheduler, lambda: self.port.close())

        async def scrape() -> bytes:
            return b"all metrics"

        adapters = AdapterRegistry(steps, (), None)
        self.port = Port(steps, scrape, scrape, lambda: b"all requests", self._scheduler_link.send, adapters)

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        await self._worker_link.open(ours)
        await self._scheduler_link.open(theirs)

    def die(self) -> None:
        self._worker_link.close()

    def _to_scheduler(self, message: msg.ClientMessage) -> None:
        self.port.receive(message)

    def _to_worker(self, message: msg.ToWorker) -> None:
        if isinstance(message, msg.Tokens):
            self.num_frames += 1
            self.client.on_tokens(message)
        elif isinstance(message, msg.Answer):
            self.client.on_answer(message)


def linked(test: Callable[[Pair, FakeBackend], object], **backend: object) -> None:
    async def main() -> None:
        fake = FakeStepLoop(**backend)  # type: ignore[arg-type]
        pair = Pair(fake)
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
        received = Received()
        pair.client.submit(request(1 << 40), received)
        await until(lambda: len(received.outputs) == 4)
        assert received.outputs == WHOLE
        assert backend.requests == [request(1 << 40)]

    linked(test, script=lambda request: WHOLE)


def test_what_one_turn_has_for_a_worker_is_one_message() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        receivers = [Received() for _ in range(50)]
        for number, receiver in enumerate(receivers):
            pair.client.submit(request(number), receiver)
        await until(lambda: all(receiver.outputs and receiver.outputs[-1].finish_reason for receiver in receivers))
        assert pair.num_frames <= len(outputs_of("hello world")) + 2

    linked(test)


def test_a_cancelled_request_is_cancelled_at_the_other_end_and_hears_nothing_more() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        received = Received()
        pair.client.submit(request(3), received)
        await until(lambda: len(received.outputs) == 1)
        pair.client.cancel(3)
        pair.client.cancel(3)
        await until(lambda: backend.cancelled)
        backend.go_on.set()
        await asyncio.sleep(0.01)
        assert backend.cancelled == [3]
        assert len(received.outputs) == 1

    linked(test, pause_after=1)


def test_requests_of_a_dead_worker_are_cancelled() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        pair.client.submit(request(1), Received())
        pair.client.submit(request(2), Received())
        await until(lambda: len(backend.requests) == 2)
        pair.die()
        await until(lambda: backend.cancelled)
        assert sorted(backend.cancelled) == [1, 2]

    linked(test, pause_after=1)


def test_tokens_of_many_requests_are_told_in_slices_with_turns_for_others_in_between() -> None:
    async def main() -> None:
        client = SchedulerClient(LIMITS, lambda message: None)
        receivers = [Received() for _ in range(10 * DELIVERIES_PER_TURN)]
        for number, receiver in enumerate(receivers):
            client.submit(request(number), receiver)
        ids = list(range(len(receivers)))
        client.on_tokens(msg.Tokens(ids, [5] * len(ids), [-0.5] * len(ids), []))
        told = [0]
        while told[-1] < len(receivers):
            told.append(sum(bool(receiver.outputs) for receiver in receivers))
            assert len(told) < 50
            await asyncio.sleep(0)
        assert max(later - earlier for earlier, later in pairwise(told)) == DELIVERIES_PER_TURN

    asyncio.run(main())


def test_tokens_that_wait_to_be_told_keep_their_order_and_the_end_is_last() -> None:
    async def main() -> None:
        client = SchedulerClient(LIMITS, lambda message: None)
        receivers = [Received() for _ in range(3 * DELIVERIES_PER_TURN)]
        ids = list(range(len(receivers)))
        for number, receiver in enumerate(receivers):
            client.submit(request(number), receiver)
        for token_id in range(4):
            client.on_tokens(msg.Tokens(ids, [token_id] * len(ids), [0.0] * len(ids), []))
        ends = [(place, Output(4, finish_reason=FinishReason.LENGTH)) for place in range(len(ids))]
        client.on_tokens(msg.Tokens(ids, [4] * len(ids), [0.0] * len(ids), ends))
        client.cancel(len(receivers) - 1)
        await until(lambda: all(receiver.outputs and receiver.outputs[-1].finish_reason for receiver in receivers[:-1]))
        for receiver in receivers[:-1]:
            assert [output.token_id for output in receiver.outputs] == [0, 1, 2, 3, 4]
        assert receivers[-1].outputs == [], "it was cancelled while its tokens waited"

    asyncio.run(main())


@pytest.mark.parametrize("error", [GrammarError("no such rule"), LegatoError("shard 0 is lost")])
def test_a_grammar_that_cannot_be_prepared_fails_with_the_same_error(error: Exception) -> None:
    class Refusing(FakeStepLoop):
        async def prepare(self, grammar: Grammar) -> None:
            raise error

    async def main() -> None:
        pair = Pair(Refusing())
        await pair.open()
        with pytest.raises(type(error), match=str(error)):
            await pair.client.prepare(Grammar(GrammarKind.REGEX, "a"))

    asyncio.run(main())


def test_metrics_and_draining_are_asked_for_at_the_other_end() -> None:
    async def test(pair: Pair, backend: FakeBackend) -> None:
        assert await pair.client.scrape() == b"all metrics"
        assert await pair.client.drain() == b"all requests"

    linked(test)


def test_a_receiver_that_cancels_hears_nothing_more_of_what_has_arrived() -> None:
    """Found by the simulation: two steps of a router that was stopped are told together."""

    async def main() -> None:
        sent: list[msgspec.Struct] = []
        client = SchedulerClient(LIMITS, sent.append)
        heard: list[int] = []

        def receive(output: Output) -> None:
            heard.append(output.token_id)
            client.cancel(1)

        client.submit(request(1), receive)
        client.on_tokens(msg.Tokens([1, 1], [5, 6], [0.0, 0.0], [(1, Output(6, finish_reason=FinishReason.LENGTH))]))
        assert heard == [5]
        assert sent[-1] == msg.Cancel(1)

    asyncio.run(main())


def test_a_state_is_believed_for_a_while_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client, told = SchedulerClient(LIMITS, lambda message: None), msg.ServerState(healthy=True, live=True)
        assert client.state is NO_STATE
        client.on_state(told)
        assert client.state is told
        later = asyncio.get_running_loop().time() + STATE_SECONDS
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: later)
        assert client.state is NO_STATE
        client.on_state(told)
        assert client.state is told

    asyncio.run(main())


def test_frames_may_come_in_pieces() -> None:
    async def main() -> None:
        arrived: list[msg.ToScheduler] = []
        link = Link(decoder_for(msg.ToScheduler), arrived.append, lambda: None)
        body = msgspec.msgpack.encode([msg.Cancel(1), msg.Cancel(2)])
        frame = len(body).to_bytes(4, "big") + body
        for byte in frame + frame:
            link.data_received(bytes([byte]))
        assert arrived == [msg.Cancel(1), msg.Cancel(2)] * 2

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
        turnstile, begun = AcceptThrottle(per_turn=3), list[int]()

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
    first.listen_first().close()
    with pytest.raises(EndpointInUse, match="--port"):
        Listeners("127.0.0.1", first.port, num)
    first.close()


@pytest.mark.parametrize("num", [1, 3])
def test_of_two_that_bound_a_port_the_second_to_listen_learns_of_the_first(num: int) -> None:
    first = Listeners("127.0.0.1", 0, num)
    second = Listeners("127.0.0.1", first.port, num)
    first.listen_first().close()
    with pytest.raises(EndpointInUse, match="--port"):
        second.listen_first()
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
    """And nothing else: asyncio logs exceptions that nobody asks a future for."""
    logged: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        listeners = Listeners("127.0.0.1", 0, 1)
        workers = Workers(msg.WorkerSetup("info", True, f"{tmp_path}/nothing", None, 1000), listeners.sockets)
        try:
            with pytest.raises(WorkerFailed, match="nothing: no such folder"):
                await workers.load()
        finally:
            workers.kill()
            listeners.close()
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(main())
    assert logged == []


class DyingWorker:
    """Dies once it serves. Of those that were started, the second and third could not be."""

    num_started = 0

    def __init__(self, number: int, listener: socket.socket) -> None:
        DyingWorker.num_started += 1
        if self.num_started in (2, 3):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.number = number
        self.figures: dict[str, float] = {}
        self.loaded, self.serving = asyncio.Future[None](), asyncio.Future[None]()

    async def load(self, setup: msg.WorkerSetup) -> None:
        self.loaded.set_result(None)
        self.serving.set_result(None)

    def ask(self, now: float) -> None: ...

    def is_hung(self, now: float, timeout: float) -> bool:
        return False

    async def exit(self) -> str:
        await asyncio.sleep(0.01)
        return f"HTTP worker {self.number} was killed by SIGKILL"


def test_a_worker_that_cannot_be_started_is_tried_again_until_there_were_too_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory, processes or descriptors may have run out for a moment."""
    monkeypatch.setattr(router_workers, "WorkerProcess", DyingWorker)
    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.01)

    async def main() -> None:
        listeners = Listeners("127.0.0.1", 0, 1)
        workers = Workers(msg.WorkerSetup("info", True, "", None, 1000), listeners.sockets, max_restarts=4)
        await workers.load()
        await workers.serve(lambda worker, number: None)
        with pytest.raises(TooManyRestarts, match="HTTP worker 0 was killed by SIGKILL; it is not replaced"):
            await workers.watch()
        listeners.close()

    asyncio.run(main())
    assert caplog.text.count("HTTP worker 0 cannot be started: Resource temporarily unavailable") == 2
    assert DyingWorker.num_started == 5


def test_a_worker_that_hangs_while_it_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(worker: WorkerProcess, setup: msg.WorkerSetup) -> None:
        worker._process.send_signal(signal.SIGSTOP)
        await worker._link.open(worker._connection)

    monkeypatch.setattr(WorkerProcess, "load", stop)
    monkeypatch.setattr(router_workers, "START_SILENCE", 0.2)
    monkeypatch.setattr(router_workers, "ASK_SECONDS", 0.1)

    async def main() -> None:
        listeners = Listeners("127.0.0.1", 0, 1)
        workers = Workers(msg.WorkerSetup("info", True, "", None, 1000), listeners.sockets)
        try:
            with pytest.raises(WorkerFailed, match=r"HTTP worker 0 gave no sign of life for 0\.2 s"):
                await asyncio.wait_for(workers.load(), 60)
        finally:
            workers.kill()
            listeners.close()

    asyncio.run(main())


def loading(test: Callable[[WorkerProcess], Awaitable[None]]) -> None:
    """A worker that waits for its first message."""

    async def main() -> None:
        listeners = Listeners("127.0.0.1", 0, 1)
        worker = WorkerProcess(0, listeners.sockets[0])
        await worker._link.open(worker._connection)
        try:
            await asyncio.wait_for(test(worker), 60)
        finally:
            worker.kill()
            listeners.close()

    asyncio.run(main())


def test_a_worker_that_still_loads_has_counted_nothing() -> None:
    async def test(worker: WorkerProcess) -> None:
        await worker.report()
        assert worker.figures == {}
        assert not worker.lost.is_set()

    loading(test)


def test_a_worker_that_still_loads_ends_at_once_when_all_do() -> None:
    async def test(worker: WorkerProcess) -> None:
        worker.drain()
        assert await worker.exit() == "HTTP worker 0 exited with code 0"

    loading(test)


def test_a_worker_ends_when_its_scheduler_is_gone() -> None:
    async def main() -> None:
        listeners = Listeners("127.0.0.1", 0, 1)
        worker = WorkerProcess(0, listeners.sockets[0])
        await worker.load(msg.WorkerSetup("info", True, "nothing", None, 1000))
        worker._link.close()
        assert await asyncio.wait_for(worker.exit(), 60)
        listeners.close()

    asyncio.run(main())


def test_a_worker_that_is_told_the_state_answers_while_it_still_loads() -> None:
    async def test(worker: WorkerProcess) -> None:
        worker.tell(msg.ServerState(), now=10.0)
        assert worker.is_hung(now=16.0, timeout=5.0)
        while worker.is_hung(now=16.0, timeout=5.0):
            await asyncio.sleep(0.01)

    loading(test)


def test_a_stopped_worker_is_hung_and_killed() -> None:
    async def test(worker: WorkerProcess) -> None:
        worker.tell(msg.ServerState(), now=10.0)
        while worker.is_hung(now=16.0, timeout=5.0):
            await asyncio.sleep(0.01)
        worker._process.send_signal(signal.SIGSTOP)
        worker.tell(msg.ServerState(), now=20.0)
        worker.tell(msg.ServerState(), now=21.0)
        await asyncio.sleep(0.1)
        assert not worker.is_hung(now=24.9, timeout=5.0)
        assert worker.is_hung(now=25.1, timeout=5.0)
        worker.excuse()
        assert not worker.is_hung(now=25.1, timeout=5.0)
        worker.kill()
        assert await worker.exit() == "HTTP worker 0 was killed by SIGKILL"

    loading(test)


def test_a_worker_that_does_not_read_is_hung_before_its_messages_fill_the_memory() -> None:
    async def test(worker: WorkerProcess) -> None:
        worker._process.send_signal(signal.SIGSTOP)
        tokens = msg.Tokens([1] * 500_000, [1] * 500_000, [1.0] * 500_000, [])
        for _ in range(MAX_UNREAD // 500_000):
            worker._link.send(tokens)
            worker._link.flush()
            if worker.is_hung(now=0.0, timeout=5.0):
                return
        raise AssertionError(worker._link.num_buffered)

    loading(test)


def test_a_worker_that_loaded_for_long_says_what_it_was_told_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.http.worker.create_app", lambda *args: None)

    async def main() -> None:
        with socket.socket() as listener:
            worker = HttpWorker(listener)
            worker._on_message(msg.ServerState(restarting=True))
            serve = msg.Serve(LIMITS, SETTINGS, 1, 1.0, msg.ServerState(healthy=True, live=True, ready=True))
            worker._app(serve, None, None, None)  # type: ignore[arg-type]
            assert worker._scheduler is not None and worker._scheduler.state == msg.ServerState(restarting=True)

    asyncio.run(main())
