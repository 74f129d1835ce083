"""The scheduler as a worker sees it: the other end of a link."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from legato.api.errors import Overloaded
from legato.common.errors import LegatoError
from legato.grammar.errors import GrammarError
from legato.ipc import messages as say
from legato.ipc.seam import Sink
from legato.scheduling.state import GenerationRequest, Grammar, ModelLimits, Output

# Seconds for which tokens prove that scheduler and shards are well: asking would say nothing newer.
PROOF = 1.0
# Requests that hear of their tokens in one turn of the event loop. Each of them has something written to its client,
# which takes 20 microseconds and more.
HEARING_PER_TURN = 32


class RemoteBackend:
    """`seam.Backend` and `seam.Permits` of one worker. Whoever owns the link hands in what arrives on it."""

    def __init__(self, limits: ModelLimits, send: Callable[[msgspec.Struct], None]) -> None:
        self.limits = limits
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._sinks: dict[int, Sink] = {}
        self._numbers = itertools.count(1)
        self._questions: dict[int, asyncio.Future[say.Answer]] = {}
        self._last_tokens = 0.0
        # What has arrived, by request, in the order in which the requests will hear of it.
        self._unheard: dict[int, list[Output]] = {}
        self._telling = False

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        self._sinks[request.id] = sink
        self._send(say.Submit(request))

    def cancel(self, request_id: int) -> None:
        if self._sinks.pop(request_id, None) is not None:
            self._send(say.Cancel(request_id))

    async def take(self, num: int) -> None:
        asked = self._ask(lambda number: say.TakePermits(number, num))
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(lambda asked: self.give_back(num) if asked.result().value else None)
            raise
        if not answer.value:
            raise Overloaded(answer.retry_after)

    def give_back(self, num: int) -> None:
        self._send(say.GivePermits(num))

    # ---- questions -------------------------------------------------------------------------------------------------

    async def prepare(self, grammar: Grammar) -> None:
        answer = await self._ask(lambda number: say.Prepare(number, grammar))
        if answer.error is not None:
            raise GrammarError(answer.error) if answer.grammar_is_wrong else LegatoError(answer.error)

    async def healthy(self) -> bool:
        if self._loop.time() - self._last_tokens < PROOF:
            return True
        return bool((await self._ask(say.CheckHealth)).value)

    async def scrape(self) -> bytes:
        """The metrics of all processes."""
        answer = await self._ask(say.Scrape)
        assert isinstance(answer.value, bytes)
        return answer.value

    def _ask(self, question: Callable[[int], msgspec.Struct]) -> asyncio.Future[say.Answer]:
        number = next(self._numbers)
        asked: asyncio.Future[Any] = self._loop.create_future()
        self._questions[number] = asked
        self._send(question(number))
        return asked

    # ---- what arrives ----------------------------------------------------------------------------------------------

    def on_answer(self, answer: say.Answer) -> None:
        asked = self._questions.pop(answer.number)
        if not asked.done():  # or nobody waits any more
            asked.set_result(answer)

    def on_admitted(self, admitted: say.Admitted) -> None:
        for request_id in admitted.request_ids:
            if (sink := self._sinks.get(request_id)) is not None:
                sink.admitted()

    def on_tokens(self, tokens: say.Tokens) -> None:
        """A step may have tokens for thousands of requests. They hear of them a few at a time, so that everybody else,
        perhaps somebody's health check, has a turn in between. What comes for a request meanwhile, it hears together.
        """
        self._last_tokens = self._loop.time()
        unheard, rest = self._unheard, dict(tokens.rest)
        plain = zip(tokens.request_ids, tokens.token_ids, tokens.logprobs, strict=True)
        for place, (request_id, token_id, logprob) in enumerate(plain):
            output = rest[place] if place in rest else Output(token_id, logprob)
            unheard.setdefault(request_id, []).append(output)
        if not self._telling:
            self._tell()

    def _tell(self) -> None:
        for request_id in list(itertools.islice(self._unheard, HEARING_PER_TURN)):
            outputs = self._unheard.pop(request_id)
            last = outputs[-1]
            ended = last.finish_reason is not None or last.error is not None
            sink = self._sinks.pop(request_id, None) if ended else self._sinks.get(request_id)
            if sink is not None:  # or it was cancelled
                for output in outputs:
                    sink([output])
        self._telling = bool(self._unheard)
        if self._telling:
            self._loop.call_soon(self._tell)
