"""The scheduler's end of the link to one HTTP worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from operator import attrgetter

import msgspec

from legato.common.errors import LegatoError
from legato.grammar.errors import GrammarError
from legato.grammar.kinds import Grammar
from legato.ipc import messages as msg
from legato.router.adapters import AdapterRefused, AdapterRegistry
from legato.router.step_loop import StepLoop
from legato.scheduling.state import GenerationRequest, Output, PromptChunk

logger = logging.getLogger(__name__)

# The fields that few outputs set, and their defaults.
_RARE = [each for each in msgspec.structs.fields(Output) if each.name not in ("token_id", "logprob")]
_rare_part = attrgetter(*(each.name for each in _RARE))
_DEFAULTS = tuple(each.default for each in _RARE)


class Port:
    """Collects the outputs of a step for one worker into one message, and cancels its requests when it is gone."""

    def __init__(
        self,
        steps: StepLoop,
        scrape: Callable[[], Awaitable[bytes]],
        observe: Callable[[], Awaitable[bytes]],
        drain: Callable[[], bytes],
        send: Callable[[msgspec.Struct], None],
        adapters: AdapterRegistry,
    ) -> None:
        self._steps = steps
        self._adapters = adapters
        self._scrape = scrape
        self._observe = observe
        self._drain = drain
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._requests: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        # What this turn of the event loop has for the worker.
        self._tokens = msg.Tokens([], [], [], [])

    def receive(self, message: msg.ClientMessage) -> None:
        match message:
            case msg.Submit(request):
                self._submit(request)
            case msg.Cancel(request_id):
                self._requests.discard(request_id)
                self._steps.cancel(request_id)
            case msg.Prepare(number, grammar):
                self._spawn(self._prepare(number, grammar))
            case msg.BeginDrain(number):
                self._send(msg.Answer(number, self._drain()))
            case msg.AskLoad(number):
                self._send(msg.Answer(number, msgspec.json.encode(self._steps.load)))
            case msg.AskEvents(number, after):
                events = self._steps.events
                self._send(msg.Answer(number, b"" if events is None else events.page(after)))
            case msg.ChangeAdapter(number, name, source, revision):
                self._spawn(self._change_adapter(number, name, source, revision))
            case msg.Scrape(number, dashboard):
                self._spawn(self._render(number, self._observe if dashboard else self._scrape))

    def close(self) -> None:
        """The worker is gone."""
        for task in self._tasks:
            task.cancel()
        requests, self._requests = self._requests, set()
        for request_id in requests:
            self._steps.cancel(request_id)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _submit(self, request: GenerationRequest) -> None:
        self._requests.add(request.id)
        try:
            self._steps.submit(request, self)
        except Exception:  # a bug in one request must not cost the others
            logger.exception("The scheduler failed on request %d", request.id)
            self.put(request.id, Output(error="the scheduler failed"))

    def put(self, request_id: int, output: Output) -> None:
        tokens = self._tokens
        if not tokens.request_ids:
            self._loop.call_soon(self._deliver)
        if _rare_part(output) != _DEFAULTS:
            tokens.rest.append((len(tokens.request_ids), output))
            if output.finish_reason is not None or output.error is not None:
                self._requests.discard(request_id)
        tokens.request_ids.append(request_id)
        tokens.token_ids.append(output.token_id)
        tokens.logprobs.append(output.logprob)

    def trace(self, request_id: int, chunk: PromptChunk) -> None:
        """Sent at once, and so before the tokens of this turn."""
        self._send(msg.ChunkDone(request_id, chunk))

    def _deliver(self) -> None:
        tokens, self._tokens = self._tokens, msg.Tokens([], [], [], [])
        self._send(tokens)

    # ---- questions -------------------------------------------------------------------------------------------------

    async def _prepare(self, number: int, grammar: Grammar) -> None:
        try:
            await self._steps.prepare(grammar)
        except (GrammarError, LegatoError) as error:
            self._send(msg.Answer(number, False, str(error), isinstance(error, GrammarError)))
        else:
            self._send(msg.Answer(number))

    async def _change_adapter(self, number: int, name: str, source: str | None, revision: str | None) -> None:
        """Goes on if the worker is gone meanwhile: half a change would be worse."""
        change = self._adapters.unload(name) if source is None else self._adapters.load(name, source, revision)
        try:
            await asyncio.shield(asyncio.ensure_future(change))
        except AdapterRefused as error:
            self._send(msg.Answer(number, False, str(error), status=error.status))
        else:
            self._send(msg.Answer(number))

    async def _render(self, number: int, render: Callable[[], Awaitable[bytes]]) -> None:
        self._send(msg.Answer(number, await render()))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
