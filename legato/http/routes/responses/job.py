"""From a request of the Responses API to the response object, in one piece or as events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from legato.api.errors import Overloaded, RequestError, TooLong
from legato.api.openai.responses import TokenLogprob
from legato.api.responses import events as ev
from legato.api.responses.items import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from legato.api.responses.requests import ResponsesRequest
from legato.chat.answers import AnswerParser
from legato.chat.tools.parser import CallBegins, CallGoesOn, Content, Event
from legato.common.identity import creation_time, new_hex
from legato.http import sse
from legato.http.answering import Choice
from legato.http.inference import Inference
from legato.http.routes.openai import errors as openai_errors
from legato.http.routes.openai.conversation_job import ConversationJob
from legato.http.routes.openai.logprobs import chat_logprobs
from legato.http.routes.openai.token_names import TokenNames
from legato.http.routes.responses.output import ResponseOutput, new_id
from legato.http.routes.responses.tools import INPUT, ResponseTools, forced_text
from legato.http.routes.responses.translation import ENCRYPTED, Item, chat_request, reasoning_wish
from legato.http.shapes import decoded_shape
from legato.http.sse import named_event
from legato.http.streams import Piece
from legato.scheduling.state import FinishReason

_encode = msgspec.json.Encoder().encode
Keep = Callable[[ResponseObject], Awaitable[None]]


class ResponseJob(ConversationJob):
    def __init__(
        self,
        request: ResponsesRequest,
        history: list[Item],
        inference: Inference,
        names: TokenNames,
        keep: Keep | None = None,
        *,
        stored: bool = False,
    ) -> None:
        """`keep` stores the response; it may be `stored` without, by others."""
        self.tools = ResponseTools.of(request.tools)
        chat = chat_request(request, history, self.tools)
        self._forced = forced_text(request.tool_choice, self.tools)
        grammar = None if self._forced is None else self.tools.grammars[self._forced]
        super().__init__(chat, inference, inference.chat_format, reasoning_wish(request), grammar)
        self._keep = keep
        self._names = names
        wants_summary = request.reasoning is not None and request.reasoning.summary not in (None, "none")
        self.output = ResponseOutput(self.tools, as_summary=wants_summary, encrypt=ENCRYPTED in (request.include or ()))
        self._parser = AnswerParser(None, None)
        self._waiting: list[TokenLogprob] = []
        self._input = ""
        self.response = new_response(request, inference.settings.model_id, stored=stored or keep is not None)

    def add(self, pieces: list[Piece]) -> Iterable[ev.ResponseEvent]:
        """The parts that these tokens brought."""
        for some in [pieces] if self.num_top is None else [[piece] for piece in pieces]:
            events = self._parser.feed(piece.text for piece in some)
            yield from self.output.add(self._as_call(events), self._logprobs(some, events))

    def _as_call(self, events: list[Event]) -> list[Event]:
        """Where the text stands for a call, what would be content is its input."""
        if self._forced is None:
            return events
        self._input += "".join(event.text for event in events if isinstance(event, Content))
        return [event for event in events if not isinstance(event, Content)]

    def begin(self) -> None:
        """When the prompt is known, and before the first token."""
        self._parser = self.parser_of_all()

    def _logprobs(self, pieces: list[Piece], events: list[Event]) -> list[TokenLogprob]:
        """Those of the text among the events: of tokens that were held back until it was known what they are, too."""
        if self.num_top is None:
            return []
        waiting, self._waiting = self._waiting + chat_logprobs(pieces, self._names).content, []
        if any(isinstance(event, Content) for event in events):
            return waiting
        self._waiting = [] if events else waiting
        return []

    def finish(self, choice: Choice) -> Iterable[ev.ResponseEvent]:
        """The rest of the parts; then the response is complete."""
        yield from self.output.add(self._as_call(self._parser.finish()))
        if self._forced is not None:
            arguments = _encode({INPUT: self._input}).decode()
            called = CallBegins(0, f"call_{new_hex(24)}", self._forced)
            yield from self.output.add([called, CallGoesOn(0, arguments)])
        cut_off = choice.stream.transcript.finish_reason is FinishReason.LENGTH
        yield from self.output.end("incomplete" if cut_off else "completed")
        response = self.response
        response.status = "incomplete" if cut_off else "completed"
        response.incomplete_details = IncompleteDetails(reason="max_output_tokens") if cut_off else None
        response.completed_at = None if cut_off else int(time.time())
        response.output = self.output.items
        stream, num_tokens = choice.stream, choice.num_tokens
        response.usage = ResponseUsage(
            input_tokens=stream.input_len,
            input_tokens_details=InputTokensDetails(cached_tokens=stream.num_cached),
            output_tokens=num_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._parser.num_reasoning_tokens),
            total_tokens=stream.input_len + num_tokens,
        )

    def answer(self, choices: list[Choice], billed: list[Choice]) -> bytes:
        (choice,) = choices
        self.begin()
        for _ in (*self.add(choice.pieces), *self.finish(choice)):
            pass
        return _encode(self.response)

    def writer(self, choices: list[Choice]) -> ResponseWriter:
        self.begin()
        return ResponseWriter(self, choices[0])

    async def record(self) -> None:
        if self._keep is not None:
            await self._keep(self.response)


class ResponseWriter:
    def __init__(self, job: ResponseJob, choice: Choice) -> None:
        self._job = job
        self._choice = choice
        self._started = False

    def write(self, choice: Choice, pieces: list[Piece]) -> bytes:
        return self._start() + b"".join(map(named_event, self._job.add(pieces)))

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        numbers, response = self._job.output.numbers, self._job.response
        response.status = "in_progress"
        created = ev.ResponseCreated(sequence_number=next(numbers), response=response)
        return named_event(created) + self._in_progress()

    def _in_progress(self) -> bytes:
        numbers, response = self._job.output.numbers, self._job.response
        return named_event(ev.ResponseInProgress(sequence_number=next(numbers), response=response))

    def end(self) -> bytes:
        begun = self._start()
        last = b"".join(map(named_event, self._job.finish(self._choice)))
        response, number = self._job.response, next(self._job.output.numbers)
        kind = ev.ResponseCompleted if response.status == "completed" else ev.ResponseIncomplete
        return begun + last + named_event(kind(sequence_number=number, response=response))

    def fail(self, error: RequestError) -> bytes:
        begun, response = self._start(), failed(self._job.response, error)
        response.output = self._job.output.items
        number = next(self._job.output.numbers)
        return begun + named_event(ev.ResponseFailed(sequence_number=number, response=response))

    def silence(self) -> bytes:
        """A response that waits for its first token has been created nevertheless. Comments are not enough for Codex,
        which gives up on streams without events after five minutes."""
        if self._job.output.items:
            return sse.KEEP_ALIVE
        return self._start() or self._in_progress()


def failed(response: ResponseObject, error: RequestError) -> ResponseObject:
    response.status = "failed"
    message = openai_errors.message(error)
    if isinstance(error, Overloaded):  # Codex reads when to come back
        message += f". Please try again in {error.headers['retry-after']}s."
    response.error = ResponseError(code=error_code(error), message=message)
    return response


def error_code(error: RequestError) -> str:
    """OpenAI's, as far as Codex tells them apart."""
    if isinstance(error, TooLong):
        return "context_length_exceeded"
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    if error.status == 503:
        return "server_is_overloaded"
    return "server_error" if openai_errors.status(error) >= 500 else "invalid_prompt"


def new_response(request: ResponsesRequest, model: str, *, stored: bool) -> ResponseObject:
    reasoning, text = request.reasoning, request.text
    format = None if text is None or text.format is None else decoded_shape(text.format, "text.format")
    return ResponseObject(
        id=new_id("resp"),
        created_at=creation_time(),
        status="in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        model=model if request.model is None else request.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        store=stored,
        temperature=1.0 if request.temperature is None else request.temperature,
        text={"format": {"type": "text"} if format is None else format},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )
