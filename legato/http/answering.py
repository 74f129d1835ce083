"""The response path of all generation routes: check, validate, run the sequences, then one body or a stream of events.

A route brings a `Job`, which knows the fields of its API, and a `StreamErrors`, which knows its errors.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from legato.api.errors import ClientGone, Draining, InternalError, InvalidRequest, Overloaded, RequestError
from legato.http import sse
from legato.http.exchange import ClientConnection, Exchange
from legato.http.inference import Inference
from legato.http.streams import Piece, Stream, StreamGroup
from legato.http.telemetry import request_log
from legato.http.telemetry.request_log import logger
from legato.http.telemetry.tracing import HandlerTrace
from legato.http.validation import ValidRequest
from legato.ipc.routed import HEAD_HEADER, MARKED, SentTokens
from legato.scheduling.state import FinishReason
from legato.telemetry.metrics import Timings


@dataclass(frozen=True, slots=True)
class StreamErrors:
    """How an API tells of errors in a stream of which nothing was sent yet. Later ones are the writer's to tell."""

    error_event: Callable[[RequestError], bytes]
    # A refused stream still has status 200 and the error as its only event, because TGI's clients look for it there.
    # Only an overloaded or draining server says so in the status, for the load balancers in front of it.
    refuses_in_events: bool = False


@dataclass(slots=True)
class Choice:
    """One sequence in the making, or complete."""

    index: int
    prompt: int  # which of the request's prompts it answers
    stream: Stream
    # Only the prompt was asked for (`max_tokens` 0): the one token that had to be computed is not part of the answer.
    prompt_only: bool = False
    pieces: list[Piece] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return 0 if self.prompt_only else self.stream.transcript.num_tokens

    @property
    def text(self) -> str:
        return "" if self.prompt_only else self.stream.transcript.text

    @property
    def mean_logprob(self) -> float:
        return sum(piece.token.logprob or 0.0 for piece in self.pieces) / len(self.pieces)


class Writer(Protocol):
    """Encodes the events of a stream."""

    def write(self, choice: Choice, pieces: list[Piece]) -> bytes:
        """What has become of a choice since the last call. `choice.stream` knows whether that was all."""
        ...

    def end(self) -> bytes:
        """What follows when all choices are complete."""
        ...

    def fail(self, error: RequestError) -> bytes:
        """What follows, and is the last, when they cannot be completed."""
        ...

    def silence(self) -> bytes:
        """What keeps the connection alive while there is nothing to say."""
        ...


class Job(Protocol):
    """A request whose fields are checked, and how to answer it. Knows nothing of HTTP, and never waits for tokens."""

    num_prompts: int
    # Sequences to generate for each prompt.
    num_sequences: int

    @property
    def prompt_only(self) -> bool: ...

    async def requests(self) -> list[ValidRequest]:
        """One per prompt: tokenized, and with room for what is to follow."""
        ...

    def seed(self, number: int) -> int:
        """Of the nth sequence of a prompt."""
        ...

    def ranked(self, choices: list[Choice]) -> list[Choice]:
        """Complete choices, best first where that matters."""
        ...

    def billed(self, choices: list[Choice]) -> list[Choice]:
        """Those whose tokens headers and metrics count, of choices that are ranked."""
        ...

    def answer(self, choices: list[Choice], billed: list[Choice]) -> bytes: ...

    def writer(self, choices: list[Choice]) -> Writer: ...

    async def record(self) -> None:
        """Keeps the answer, in an API that gives it again. It is complete by now, and sent after this."""
        ...


async def serve(
    exchange: Exchange, inference: Inference, make_job: Callable[[], Job], errors: StreamErrors, *, stream: bool
) -> None:
    """`make_job` checks the request's fields; it is called where a failure is counted."""
    answer = _Answer(exchange, inference, make_job)
    if exchange.trace is None:
        await (answer.stream(errors) if stream else answer.whole())
        return
    with exchange.trace.handler(exchange.route) as answer.trace:
        await (answer.stream(errors) if stream else answer.whole())


def num_prompt_tokens(choices: Sequence[Choice]) -> int:
    """Prompts count once, however many sequences they have."""
    return sum(stream.input_len for stream in first_streams(choices))


def first_streams(choices: Sequence[Choice]) -> list[Stream]:
    """The first stream of each prompt."""
    return list({choice.prompt: choice.stream for choice in reversed(choices)}.values())


class _Answer:
    def __init__(self, exchange: Exchange, inference: Inference, make_job: Callable[[], Job]) -> None:
        self._exchange = exchange
        self._inference = inference
        self._make_job = make_job
        self._arrived_at = time.monotonic()
        self._headers = {"x-compute-type": inference.settings.compute_type}
        self._started = self._ended = False
        self._writer: Writer | None = None
        self._routed = exchange.routed
        # Set for a request that is traced.
        self.trace: HandlerTrace | None = None

    # ---- one body -------------------------------------------------------------------------------------------------

    async def whole(self) -> None:
        inference = self._inference
        with inference.counted():
            if self._routed is not None and self._routed.sent:
                raise InvalidRequest("only a stream can go on after tokens that were sent")
            job = self._make_job()
            num_sequences = job.num_prompts * job.num_sequences
            with inference.concurrency.held(num_sequences, self._exchange.tenant), self._exchange.client() as client:
                requests = await self._validate(job)
                with self._running(job, requests, client) as choices:
                    texts = await asyncio.gather(*(choice.stream.read_all() for choice in choices))
        for choice, pieces in zip(choices, texts, strict=True):
            choice.pieces = pieces
        ranked = job.ranked(choices)
        billed = job.billed(ranked)
        timings = self._succeeded(job, requests[0], billed)
        body = job.answer(ranked, billed)
        await job.record()
        await self._exchange.respond(body, {**self._headers, **_figures(billed, timings)})

    # ---- events ---------------------------------------------------------------------------------------------------

    async def stream(self, errors: StreamErrors) -> None:
        """The status goes out with the first event, so a request that is refused says so in its status."""
        if self._routed is not None:
            self._headers[HEAD_HEADER] = MARKED
        try:
            with self._inference.counted():
                await self._events(self._make_job())
        except ClientGone:
            raise
        except Exception as error:
            in_events = errors.refuses_in_events and not isinstance(error, Overloaded | Draining)
            if not (self._started or in_events):
                raise
            if not isinstance(error, RequestError):
                logger.exception("A stream failed")
            answered = error if isinstance(error, RequestError) else InternalError()
            request_log.failed(self._exchange.route, answered, answered.status)
            if self.trace is not None:
                self.trace.failed(answered)
            tell = errors.error_event if self._writer is None else self._writer.fail
            line = b"" if self._routed is None else self._routed.failure_mark(answered)
            await self._write(line + tell(answered))
        if not self._ended:
            await self._exchange.end()

    async def _events(self, job: Job) -> None:
        num_sequences = job.num_prompts * job.num_sequences
        concurrency, tenant = self._inference.concurrency, self._exchange.tenant
        with concurrency.held(num_sequences, tenant), self._exchange.client() as client:
            requests = await self._validate(job)
            with self._running(job, requests, client) as choices:
                await self._write_events(job, requests[0], choices)

    async def _write_events(self, job: Job, request: ValidRequest, choices: list[Choice]) -> None:
        group = StreamGroup([choice.stream for choice in choices], self._exchange.waits)
        writer = self._writer = job.writer(choices)
        write_at_once = self._exchange.write_at_once
        # Waking any of the streams wakes the group.
        keep_alive = sse.KeepAlive(choices[0].stream, self._inference.settings.keep_alive)
        self._replay(writer, choices)
        try:
            ended = group.ended
            while not ended:
                news = await group.read()
                ended = group.ended
                # The writer takes the pieces, so the mark is made first.
                line = b"" if self._routed is None else self._mark(choices, news, ended=ended)
                data = line + b"".join([writer.write(choices[number], pieces) for number, pieces in news])
                if ended:
                    data += writer.end()
                    self._succeeded(job, request, choices)
                    await job.record()
                    await self._end(data)
                    break
                if not news:
                    # A server that goes on with the stream does not know of events that tokens did not bring.
                    data += writer.silence() if self._routed is None else sse.KEEP_ALIVE
                if data:  # a token may have no text
                    if not (self._started and write_at_once is not None and write_at_once(data)):
                        await self._write(data)
                    keep_alive.sent()
        finally:
            keep_alive.close()

    def _mark(self, choices: list[Choice], news: list[tuple[int, list[Piece]]], *, ended: bool) -> bytes:
        assert self._routed is not None
        found = []
        for number, pieces in news:
            token_ids = [piece.token.id for piece in pieces]
            found.append((number, token_ids, choices[number].stream.transcript.finish_reason))
        return self._routed.mark(found, ended=ended)

    def _replay(self, writer: Writer, choices: list[Choice]) -> None:
        """Brings the writer to where another server has stopped; what it says meanwhile was sent."""
        sent = [] if self._routed is None else self._routed.sent
        for choice, before in zip(choices, sent, strict=False):
            pieces = iter(choice.pieces)
            # A choice that has ended says all at once that it has.
            sizes = [len(choice.pieces)] if before.finish_reason else before.sizes
            for size in sizes:
                if group := list(itertools.islice(pieces, size)):
                    writer.write(choice, group)

    async def _write(self, data: bytes) -> None:
        await self._start()
        await self._exchange.write(data)

    async def _end(self, data: bytes) -> None:
        await self._start()
        self._ended = True
        await self._exchange.end(data)

    async def _start(self) -> None:
        if not self._started:
            await self._exchange.start({**sse.HEADERS, **self._headers})
            self._started = True

    # ---- parts ----------------------------------------------------------------------------------------------------

    async def _validate(self, job: Job) -> list[ValidRequest]:
        async with self._inference.concurrency.validating(self._exchange.body_size, self._exchange.tenant):
            requests = await job.requests()
        for request in requests:
            self._inference.metrics.request_validated(len(request.input_ids), request.max_new_tokens)
        if self.trace is not None:
            self.trace.validated()
        self._headers["x-compute-characters"] = str(sum(len(request.inputs) for request in requests))
        return requests

    def _succeeded(self, job: Job, request: ValidRequest, choices: list[Choice]) -> Timings:
        """Records the whole request under its first prompt, as TGI does."""
        timings = self._inference.succeeded([choice.stream for choice in choices], self._arrived_at)
        num_tokens = sum(choice.stream.transcript.num_tokens for choice in choices)
        seed = choices[0].stream.seed
        num_drafts = sum(choice.stream.num_drafts for choice in choices)
        request_log.succeeded(self._exchange.route, request, job.num_sequences, timings, seed, num_tokens, num_drafts)
        if self.trace is not None:
            model = self._inference.settings.model_id
            self.trace.succeeded(request, job.num_sequences, timings, seed, model)
        return timings

    @contextmanager
    def _running(self, job: Job, requests: list[ValidRequest], client: ClientConnection) -> Iterator[list[Choice]]:
        """Choices 0 to `num_sequences` - 1 are of the first prompt, and so on."""
        choices: list[Choice] = []
        make = Stream if self.trace is None else self.trace.stream
        sent = self._sent(job, requests)
        for prompt, request in enumerate(requests):
            for number in range(job.num_sequences):
                before = sent[len(choices)] if sent else SentTokens()
                stream = self._inference.stream(request, job.seed(number), client.tenant, make, before.token_ids)
                choice = Choice(len(choices), prompt, stream, job.prompt_only)
                if before.token_ids:
                    reason = None if before.finish_reason is None else FinishReason(before.finish_reason)
                    choice.pieces = stream.replay(before.token_ids, reason)
                choices.append(choice)
        with self._inference.running([choice.stream for choice in choices], client):
            yield choices

    def _sent(self, job: Job, requests: list[ValidRequest]) -> list[SentTokens]:
        """What the client has got of each choice from another server; empty if it has got nothing."""
        if self._routed is None or not self._routed.sent:
            return []
        limits = [request.max_new_tokens for request in requests for _ in range(job.num_sequences)]
        self._routed.check_sent(limits, self._inference.scheduler.limits.vocab_size)
        return self._routed.sent


def _figures(choices: list[Choice], timings: Timings) -> dict[str, str]:
    def milliseconds(seconds: float) -> str:
        return str(int(seconds * 1000))

    return {
        "content-type": "application/json",
        "x-compute-time": f"{timings.total:.9f}",
        "x-total-time": milliseconds(timings.total),
        "x-validation-time": milliseconds(timings.validation),
        "x-queue-time": milliseconds(timings.queue),
        "x-inference-time": milliseconds(timings.inference),
        "x-time-per-token": milliseconds(timings.per_token),
        "x-prompt-tokens": str(num_prompt_tokens(choices)),
        "x-generated-tokens": str(sum(choice.num_tokens for choice in choices)),
    }
