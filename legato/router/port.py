"""What one HTTP worker gets from the scheduler: its requests, its share of the permits, its answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from operator import attrgetter

import msgspec

from legato.common.errors import LegatoError
from legato.grammar.errors import GrammarError
from legato.ipc import messages as say
from legato.ipc.seam import Backend
from legato.router.permits import PermitPool
from legato.scheduling.state import GenerationRequest, Grammar, Output

logger = logging.getLogger(__name__)

# What only few outputs have, and what the others have instead.
_RARE = [each for each in msgspec.structs.fields(Output) if each.name not in ("token_id", "logprob")]
_rare_part = attrgetter(*(each.name for each in _RARE))
_NOTHING = tuple(each.default for each in _RARE)


class Port:
    """The scheduler's end of the link to one worker. Whatever the worker holds is given back when it is closed."""

    def __init__(
        self,
        backend: Backend,
        permits: PermitPool,
        scrape: Callable[[], Awaitable[bytes]],
        send: Callable[[msgspec.Struct], None],
    ) -> None:
        self._backend = backend
        self._permits = permits
        self._scrape = scrape
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._num_permits = 0
        self._requests: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        # What this turn of the event loop has for the worker.
        self._tokens = say.Tokens([], [], [], [])
        self._admitted: list[int] = []

    def receive(self, wish: say.Wish) -> None:
        match wish:
            case say.Submit(request):
                self._submit(request)
            case say.Cancel(request_id):
                self._requests.discard(request_id)
                self._backend.cancel(request_id)
            case say.TakePermits(number, count):
                self._take(number, count)
            case say.GivePermits(count):
                self._num_permits -= count
                self._permits.give_back(count)
            case say.Prepare(number, grammar):
                self._spawn(self._prepare(number, grammar))
            case say.CheckHealth(number):
                self._spawn(self._check_health(number))
            case say.Scrape(number):
                self._spawn(self._render(number))

    def close(self) -> None:
        """The worker is gone."""
        for task in self._tasks:
            task.cancel()
        requests, self._requests = self._requests, set()
        for request_id in requests:
            self._backend.cancel(request_id)
        self._permits.give_back(self._num_permits)
        self._num_permits = 0

    # ---- requests --------------------------------------------------------------------------------------------------

    def _submit(self, request: GenerationRequest) -> None:
        self._requests.add(request.id)
        try:
            self._backend.submit(request, _Sink(self, request.id))
        except Exception:  # a bug in one request is no reason to take everybody else's away
            logger.exception("The scheduler refused a request")
            self.put(request.id, [Output(error="the scheduler failed")])

    def put(self, request_id: int, outputs: list[Output]) -> None:
        tokens = self._tokens
        if not tokens.request_ids:
            self._loop.call_soon(self._deliver)
        for output in outputs:
            if _rare_part(output) != _NOTHING:
                tokens.rest.append((len(tokens.request_ids), output))
                if output.finish_reason is not None or output.error is not None:
                    self._requests.discard(request_id)
            tokens.request_ids.append(request_id)
            tokens.token_ids.append(output.token_id)
            tokens.logprobs.append(output.logprob)

    def _deliver(self) -> None:
        tokens, self._tokens = self._tokens, say.Tokens([], [], [], [])
        self._send(tokens)

    def admit(self, request_id: int) -> None:
        if not self._admitted:
            self._loop.call_soon(self._announce)
        self._admitted.append(request_id)

    def _announce(self) -> None:
        admitted, self._admitted = self._admitted, []
        self._send(say.Admitted(admitted))

    # ---- questions -------------------------------------------------------------------------------------------------

    def _take(self, number: int, count: int) -> None:
        if self._permits.try_take(count):
            self._num_permits += count
            self._send(say.Answer(number))
        else:
            self._send(say.Answer(number, False, retry_after=self._permits.refuse(count)))

    async def _prepare(self, number: int, grammar: Grammar) -> None:
        try:
            await self._backend.prepare(grammar)
        except (GrammarError, LegatoError) as error:
            self._send(say.Answer(number, False, str(error), isinstance(error, GrammarError)))
        else:
            self._send(say.Answer(number))

    async def _check_health(self, number: int) -> None:
        self._send(say.Answer(number, await self._backend.healthy()))

    async def _render(self, number: int) -> None:
        self._send(say.Answer(number, await self._scrape()))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Sink:
    """Where the outputs of one remote request go."""

    __slots__ = ("_port", "_request_id")

    def __init__(self, port: Port, request_id: int) -> None:
        self._port = port
        self._request_id = request_id

    def admitted(self) -> None:
        self._port.admit(self._request_id)

    def __call__(self, outputs: list[Output]) -> None:
        self._port.put(self._request_id, outputs)
