"""What both routes do alike: permits, prompts, running streams, and an answer in one piece or in many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol
from uuid import uuid4

from legato.api.errors import ClientGone, InternalError, InvalidRequest, RequestError
from legato.api.openai.requests import SharedFields
from legato.api.openai.responses import FinishReason, PromptTokensDetails, Usage
from legato.http import sse
from legato.http.exchange import Client, Exchange
from legato.http.inference import Inference, logger
from legato.http.routes.openai import errors
from legato.http.routes.openai.chunks import DONE, Envelope, Identity
from legato.http.routes.openai.terms import Terms
from legato.http.streams import Piece, Stream, StreamGroup
from legato.http.validation import ValidRequest
from legato.ipc.settings import RouterSettings
from legato.scheduling.state import FinishReason as NativeReason
from legato.telemetry.metrics import Timings


@dataclass(slots=True)
class Choice:
    """One answer in the making, or complete."""

    index: int
    prompt: int  # which of the request's prompts it answers
    stream: Stream
    # Only the prompt was asked for (`max_tokens` 0): the one token that had to be computed is nobody's business.
    prompt_only: bool = False
    pieces: list[Piece] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return 0 if self.prompt_only else self.stream.transcript.num_tokens

    @property
    def text(self) -> str:
        return "" if self.prompt_only else self.stream.transcript.text

    @property
    def finish_reason(self) -> FinishReason:
        by_length = self.prompt_only or self.stream.transcript.finish_reason is NativeReason.LENGTH
        return "length" if by_length else "stop"

    @property
    def mean_logprob(self) -> float:
        return sum(piece.token.logprob or 0.0 for piece in self.pieces) / len(self.pieces)


class Writer(Protocol):
    """Puts the chunks of a stream."""

    envelope: Envelope

    def write(self, choice: Choice, pieces: list[Piece]) -> bytes:
        """What has become of a choice since the last call. `choice.stream` knows whether that was all."""
        ...


class Job(Protocol):
    """A request whose fields are checked, and how to answer it. Knows nothing of HTTP, and never waits for tokens."""

    @property
    def terms(self) -> Terms: ...

    @property
    def num_prompts(self) -> int: ...

    @property
    def prompt_only(self) -> bool: ...

    async def requests(self) -> list[ValidRequest]:
        """One per prompt: tokenized, and with room for what is to follow."""
        ...

    def answer(self, choices: list[Choice], usage: Usage) -> bytes: ...

    def writer(self, num_choices: int) -> Writer: ...


def identity_of(prefix: str, request: SharedFields, settings: RouterSettings) -> Identity:
    return Identity(
        id=f"{prefix}-{uuid4().hex}",
        created=int(time.time()),
        model=settings.model_id if request.model is None else request.model,
        system_fingerprint=f"{settings.version}-{settings.docker_label or 'native'}",
    )


async def serve(exchange: Exchange, inference: Inference, request: SharedFields, make_job: Callable[[], Job]) -> None:
    """`make_job` checks the request's fields; it is called where a failure is counted."""
    if request.stream:
        await _stream(exchange, inference, make_job)
    else:
        await _answer(exchange, inference, make_job)


async def _answer(exchange: Exchange, inference: Inference, make_job: Callable[[], Job]) -> None:
    arrived_at = time.monotonic()
    with inference.counted():
        job = make_job()
        async with _permitted(inference, job):
            with exchange.client() as client:
                requests = await _validate(inference, job)
                with _running(inference, job, requests, client) as choices:
                    texts = await asyncio.gather(*(choice.stream.read_all() for choice in choices))
    for choice, pieces in zip(choices, texts, strict=True):
        choice.pieces = pieces
    timings = _succeeded(inference, choices, arrived_at)
    body = job.answer(_best(choices, job.terms), _usage(choices))
    await exchange.respond(body, _headers(inference, requests, choices, timings))


async def _stream(exchange: Exchange, inference: Inference, make_job: Callable[[], Job]) -> None:
    """Whatever is wrong with the request is said with a status of its own. Afterwards all that is left is an event."""
    arrived_at = time.monotonic()
    started = False
    try:
        with inference.counted():
            job = make_job()
            async with _permitted(inference, job):
                with exchange.client() as client:
                    requests = await _validate(inference, job)
                    with _running(inference, job, requests, client) as choices:
                        await exchange.start({**sse.HEADERS, **_compute_headers(inference, requests)})
                        started = True
                        await _events(exchange, inference, job, choices)
            _succeeded(inference, choices, arrived_at)
    except ClientGone:
        raise
    except Exception as error:
        if not started:
            raise
        if not isinstance(error, RequestError):
            logger.exception("A stream failed")
        await exchange.write(errors.event(error if isinstance(error, RequestError) else InternalError()))
    await exchange.end()


async def _events(exchange: Exchange, inference: Inference, job: Job, choices: list[Choice]) -> None:
    group = StreamGroup([choice.stream for choice in choices])
    writer, terms = job.writer(len(choices)), job.terms
    # Waking any of the streams wakes the group.
    keep_alive = sse.KeepAlive(choices[0].stream, inference.settings.keep_alive)
    try:
        while not group.ended:
            news = await group.read()
            if terms.continuous_usage:
                writer.envelope.show(_usage(choices))
            data = b"".join([writer.write(choices[number], pieces) for number, pieces in news])
            if group.ended:
                if terms.include_usage:
                    data += writer.envelope.usage(_usage(choices))
                data += DONE
            elif not news:
                data = sse.KEEP_ALIVE
            if data:  # a token may say nothing
                await exchange.write(data)
                keep_alive.sent()
    finally:
        keep_alive.close()


def _permitted(inference: Inference, job: Job) -> AbstractAsyncContextManager[None]:
    wanted, total = job.num_prompts * job.terms.best_of, inference.settings.max_concurrent_requests
    if wanted > total:  # coming back later would not help
        raise InvalidRequest(f"{wanted} sequences at once are more than this server runs: {total}", "n")
    return inference.permitted(wanted)


async def _validate(inference: Inference, job: Job) -> list[ValidRequest]:
    requests = await job.requests()
    if (grammar := job.terms.grammar) is not None:
        grammar = await inference.validator.check_grammar(grammar, job.terms.grammar_field)
        requests = [replace(request, grammar=grammar) for request in requests]
    for request in requests:
        inference.validated(request)
    return requests


@contextmanager
def _running(inference: Inference, job: Job, requests: list[ValidRequest], client: Client) -> Iterator[list[Choice]]:
    """Every prompt `best_of` times: choices 0 to `best_of` - 1 are of the first prompt, and so on."""
    choices: list[Choice] = []
    for prompt, request in enumerate(requests):
        for number in range(job.terms.best_of):
            stream = inference.stream(request, job.terms.seed_of(number), client.tenant)
            choices.append(Choice(len(choices), prompt, stream, job.prompt_only))
    with inference.running([choice.stream for choice in choices], client):
        yield choices


def _best(choices: list[Choice], terms: Terms) -> list[Choice]:
    """The `n` best of each prompt, numbered anew; where all are wanted, as they are."""
    if terms.n == terms.best_of:
        return choices
    best: list[Choice] = []
    for first in range(0, len(choices), terms.best_of):
        candidates = choices[first : first + terms.best_of]
        best += sorted(candidates, key=lambda choice: -choice.mean_logprob)[: terms.n]
    for index, choice in enumerate(best):
        choice.index = index
    return best


def _usage(choices: Sequence[Choice]) -> Usage:
    """Prompts count once, however many answers they have; answers that are thrown away count too."""
    streams = {choice.prompt: choice.stream for choice in reversed(choices)}  # the first of each prompt
    prompt_tokens = sum(stream.input_len for stream in streams.values())
    completion_tokens = sum(choice.num_tokens for choice in choices)
    cached_tokens = sum(stream.num_cached for stream in streams.values())
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def _succeeded(inference: Inference, choices: list[Choice], arrived_at: float) -> Timings:
    first, *others = (choice.stream for choice in choices)
    return inference.succeeded(first, arrived_at, *others)


def _compute_headers(inference: Inference, requests: list[ValidRequest]) -> dict[str, str]:
    return {
        "x-compute-type": inference.settings.compute_type,
        "x-compute-characters": str(sum(len(request.inputs) for request in requests)),
    }


def _headers(
    inference: Inference, requests: list[ValidRequest], choices: list[Choice], timings: Timings
) -> dict[str, str]:
    usage = _usage(choices)

    def milliseconds(seconds: float) -> str:
        return str(int(seconds * 1000))

    return {
        "content-type": "application/json",
        **_compute_headers(inference, requests),
        "x-compute-time": f"{timings.total:.9f}",
        "x-total-time": milliseconds(timings.total),
        "x-validation-time": milliseconds(timings.validation),
        "x-queue-time": milliseconds(timings.queue),
        "x-inference-time": milliseconds(timings.inference),
        "x-time-per-token": milliseconds(timings.per_token),
        "x-prompt-tokens": str(usage.prompt_tokens),
        "x-generated-tokens": str(usage.completion_tokens),
    }
