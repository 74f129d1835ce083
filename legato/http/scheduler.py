"""The scheduler as an HTTP worker sees it: the other end of the worker's link."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from legato.common.errors import LegatoError
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar
from legato.ipc import messages as msg
from legato.scheduling.adapters import AdapterInfo
from legato.scheduling.state import GenerationRequest, ModelLimits, Output, PromptChunk
from legato.telemetry.step_times import StepTimes

# Seconds after which the scheduler, which describes its state every second, counts as hung.
STATE_SECONDS = 5.0
NO_STATE = msg.ServerState()
# Requests whose tokens are delivered in one turn of the event loop. Each delivery writes to a client, which takes 20
# microseconds and more.
DELIVERIES_PER_TURN = 32

# Gets the outputs of one request, one at a time. The last has a finish reason or an error. Must not block.
Receiver = Callable[[Output], None]


class AdapterChangeFailed(LegatoError):
    """An adapter was not loaded or unloaded. `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SchedulerClient:
    """Sends requests, hands out their tokens, and asks the scheduler's questions. The owner of the link passes in what
    arrives on it."""

    def __init__(self, limits: ModelLimits, send: Callable[[msgspec.Struct], None]) -> None:
        self.limits = limits
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._receivers: dict[int, Receiver] = {}
        self._numbers = itertools.count(1)
        self._questions: dict[int, asyncio.Future[msg.Answer]] = {}
        self._state, self._state_at = NO_STATE, 0.0
        # The LoRA adapters that requests may name.
        self.adapters: dict[str, AdapterInfo] = {}
        # What has arrived, by request, in the order of delivery.
        self._undelivered: dict[int, list[Output]] = {}
        self._delivering = False
        # Of traced requests: the parts of their prompts that are computed. Only if there are any: when steps came.
        self.chunks: dict[int, list[PromptChunk]] = {}
        self.step_times: StepTimes | None = None

    @property
    def state(self) -> msg.ServerState:
        """As the scheduler described it last, without asking: health checks wait for nobody."""
        return self._state if self._loop.time() - self._state_at < STATE_SECONDS else NO_STATE

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, receiver: Receiver) -> None:
        """The scheduler may refuse: then the only output is an error with `retry_after`."""
        self._receivers[request.id] = receiver
        self._send(msg.Submit(request))

    def cancel(self, request_id: int) -> None:
        """Row and blocks are free within one step; the receiver is not called any more. Unknown ids are fine."""
        if self._receivers.pop(request_id, None) is not None:
            self._send(msg.Cancel(request_id))

    # ---- questions -------------------------------------------------------------------------------------------------

    async def prepare(self, grammar: Grammar) -> None:
        """Have a grammar compiled before a request comes with it. GrammarError; LegatoError if the shards are lost."""
        answer = await self._ask(lambda number: msg.Prepare(number, grammar))
        if answer.error is not None:
            raise GrammarError(answer.error) if answer.grammar_is_wrong else LegatoError(answer.error)

    async def drain(self) -> bytes:
        """Have no more requests admitted, by any worker. Returns what is left, as JSON."""
        answer = await self._ask(msg.BeginDrain)
        assert isinstance(answer.value, bytes)
        return answer.value

    async def change_adapter(self, name: str, source: str | None, revision: str | None = None) -> None:
        """Load an adapter from `source`, or without one unload it. AdapterChangeFailed."""
        answer = await self._ask(lambda number: msg.ChangeAdapter(number, name, source, revision))
        if answer.error is not None:
            raise AdapterChangeFailed(answer.error, answer.status)

    async def scrape(self) -> bytes:
        """The metrics of all processes."""
        answer = await self._ask(msg.Scrape)
        assert isinstance(answer.value, bytes)
        return answer.value

    async def observe(self) -> bytes:
        """The data of the dashboard."""
        answer = await self._ask(lambda number: msg.Scrape(number, dashboard=True))
        assert isinstance(answer.value, bytes)
        return answer.value

    async def load(self) -> bytes:
        """`ServerLoad`, as JSON."""
        answer = await self._ask(msg.AskLoad)
        assert isinstance(answer.value, bytes)
        return answer.value

    async def kv_events(self, after: int | None) -> bytes | None:
        """`KvEventPage`, as JSON. None if events are not recorded."""
        answer = await self._ask(lambda number: msg.AskEvents(number, after))
        assert isinstance(answer.value, bytes)
        return answer.value or None

    def _ask(self, question: Callable[[int], msgspec.Struct]) -> asyncio.Future[msg.Answer]:
        number = next(self._numbers)
        asked: asyncio.Future[Any] = self._loop.create_future()
        self._questions[number] = asked
        self._send(question(number))
        return asked

    # ---- what arrives ----------------------------------------------------------------------------------------------

    def on_adapters(self, adapters: list[AdapterInfo]) -> None:
        self.adapters = {adapter.name: adapter for adapter in adapters}

    def on_state(self, state: msg.ServerState) -> None:
        self._state, self._state_at = state, self._loop.time()

    def on_answer(self, answer: msg.Answer) -> None:
        asked = self._questions.pop(answer.number)
        if not asked.done():  # or its caller was cancelled
            asked.set_result(answer)

    def on_chunk(self, done: msg.ChunkDone) -> None:
        chunks = self.chunks.get(done.request_id)
        if chunks is not None:  # or the request has ended
            chunks.append(done.chunk)

    def on_tokens(self, tokens: msg.Tokens) -> None:
        """A step may have tokens for thousands of requests. They are delivered a few per turn of the event loop, so
        that everything else, a health check perhaps, has a turn in between."""
        if self.step_times is not None:
            self.step_times.add()
        undelivered, rest = self._undelivered, dict(tokens.rest)
        plain = zip(tokens.request_ids, tokens.token_ids, tokens.logprobs, strict=True)
        for place, (request_id, token_id, logprob) in enumerate(plain):
            output = rest[place] if place in rest else Output(token_id, logprob)
            undelivered.setdefault(request_id, []).append(output)
        if not self._delivering:
            self._deliver()

    def _deliver(self) -> None:
        for request_id in list(itertools.islice(self._undelivered, DELIVERIES_PER_TURN)):
            for output in self._undelivered.pop(request_id):
                ended = output.finish_reason is not None or output.error is not None
                receiver = self._receivers.pop(request_id, None) if ended else self._receivers.get(request_id)
                if receiver is None:  # the request was cancelled, perhaps by its receiver just now
                    break
                receiver(output)
        self._delivering = bool(self._undelivered)
        if self._delivering:
            self._loop.call_soon(self._deliver)
