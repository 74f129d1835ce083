"""HTTP workers: the real ends of their links on both sides, and a network with delays in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from legato.common.errors import LegatoError
from legato.http.scheduler import SchedulerClient
from legato.ipc import messages as msg
from legato.router.adapters import AdapterRegistry
from legato.router.port import Port
from legato.router.step_loop import StepLoop
from tests.simulation.clients import Client, grammar_of
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.scenario import LONGEST_DELAY, LONGEST_STALL, Rates


class SimulatedWorker:
    """Messages arrive in order, in both directions, until the worker is gone."""

    def __init__(
        self,
        loop: SimulatedLoop,
        rng: random.Random,
        rates: Rates,
        steps: StepLoop,
        first_id: int,
        on_submitted: Callable[[Client], None],
        on_message: Callable[[SimulatedWorker, msg.Tokens], None],
    ) -> None:
        self.next_id = first_id
        self.clients: dict[int, Client] = {}
        # Requests that have had their last output, and when the router heard of cancelled ones.
        self.ended: set[int] = set()
        self.cancelled: dict[int, float] = {}
        self.is_gone = False
        self._loop = loop
        self._rng = rng
        self._rates = rates
        self._on_submitted = on_submitted
        self._on_message = on_message
        self._last_up = self._last_down = 0.0
        adapters = AdapterRegistry(steps, (), None)
        self.port = Port(steps, self._scrape, self._scrape, lambda: b"{}", self._send_down, adapters)
        self.scheduler = SchedulerClient(steps.limits, self._send_up)

    async def _scrape(self) -> bytes:
        raise NotImplementedError

    # ---- clients ---------------------------------------------------------------------------------------------------

    def submit(self, client: Client) -> None:
        self.clients[client.request.id] = client
        client.cancel = lambda: self.cancel(client)
        grammar = grammar_of(client.request)
        if grammar is None:
            self._submit(client)
        else:
            self._loop.create_task(self._prepare(client))

    async def _prepare(self, client: Client) -> None:
        grammar = grammar_of(client.request)
        assert grammar is not None
        try:
            await self.scheduler.prepare(grammar)
        except LegatoError as error:
            if client.is_waiting:
                client.end(str(error))
            return
        if client.is_waiting and not self.is_gone:
            self._submit(client)

    def _submit(self, client: Client) -> None:
        self.scheduler.submit(client.request, client.receive)

    def cancel(self, client: Client) -> None:
        if client.is_waiting:
            client.end()
            self.scheduler.cancel(client.request.id)

    def leave(self) -> None:
        """The process is killed: the router notices that its link is closed."""
        self.is_gone = True
        for client in self.clients.values():
            if client.is_waiting:
                client.end()
        self._loop.call_later(LONGEST_DELAY * self._rng.random(), self._close)

    def _close(self) -> None:
        self.port.close()
        for client in self.clients.values():
            client.is_cancelled = True

    # ---- the network -----------------------------------------------------------------------------------------------

    def _arrival(self, last: float) -> float:
        """When a message arrives, after the last one."""
        delay = LONGEST_DELAY * self._rng.random()
        if self._rates.stall and self._rng.random() < self._rates.stall:
            delay = LONGEST_STALL * self._rng.random()
        return max(last, self._loop.time() + delay)

    def _send_up(self, message: msgspec.Struct) -> None:
        self._last_up = self._arrival(self._last_up)
        self._loop.call_at(self._last_up, self._arrive_up, message)

    def _send_down(self, message: msgspec.Struct) -> None:
        self._last_down = self._arrival(self._last_down)
        if type(message) is msg.Tokens:
            self._on_message(self, message)
        self._loop.call_at(self._last_down, self._arrive_down, message)

    def _arrive_up(self, message: Any) -> None:
        if self.is_gone:
            return
        self.port.receive(message)
        if type(message) is msg.Submit:
            self._on_submitted(self.clients[message.request.id])
        elif type(message) is msg.Cancel:
            self.cancelled[message.request_id] = self._loop.time()
            self.clients[message.request_id].is_cancelled = True

    def _arrive_down(self, message: Any) -> None:
        if self.is_gone:
            return
        if type(message) is msg.Tokens:
            self.scheduler.on_tokens(message)
        elif type(message) is msg.Answer:
            self.scheduler.on_answer(message)
        elif type(message) is msg.ServerState:
            self.scheduler.on_state(message)


class SimulatedWorkers:
    """What `HealthMonitor` needs of `router.workers.Workers`."""

    def __init__(self, check_state: Callable[[msg.ServerState], None]) -> None:
        self.all: list[SimulatedWorker] = []
        self._check_state = check_state

    def tell(self, state: msg.ServerState, now: float) -> None:
        self._check_state(state)
        for worker in self.all:
            if not worker.is_gone:
                worker._send_down(state)

    def excuse(self) -> None:
        """None of them ever hangs."""

    def kill_hung(self, now: float, timeout: float) -> None:
        """None of them ever hangs."""
