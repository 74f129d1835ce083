"""POST /v1/messages, and /v1/messages/count_tokens, which returns only the length of the prompt."""

from __future__ import annotations

import msgspec

from legato.api.anthropic.requests import CountTokensRequest, MessagesRequest
from legato.api.anthropic.responses import (
    AssistantMessage,
    ContentBlock,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessagesUsage,
    Ping,
    StopReason,
    TokenCount,
)
from legato.api.errors import InvalidRequest, RequestError
from legato.chat.answers import AnswerParser
from legato.common.identity import new_hex
from legato.http.answering import Choice, StreamErrors, serve
from legato.http.exchange import Exchange
from legato.http.inference import Inference
from legato.http.routes.anthropic import errors
from legato.http.routes.anthropic.blocks import BlockEvents, blocks_of
from legato.http.routes.anthropic.translation import chat_request, reasoning_wish
from legato.http.routes.openai.conversation import count_tokens
from legato.http.routes.openai.conversation_job import ConversationJob
from legato.http.sse import named_event
from legato.http.streams import Piece
from legato.scheduling.state import FinishReason

STREAM_ERRORS = StreamErrors(errors.event)

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)
_encode = msgspec.json.Encoder().encode


class MessageRoutes:
    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def messages(self, exchange: Exchange) -> None:
        request = await exchange.json(_decoder, self._inference.settings.payload_limit)

        def make_job() -> MessageJob:
            return MessageJob(request, self._inference)

        await serve(exchange, self._inference, make_job, STREAM_ERRORS, stream=bool(request.stream))

    async def count_tokens(self, exchange: Exchange) -> None:
        inference = self._inference
        request = await exchange.json(_count_decoder, inference.settings.payload_limit)
        chat, wish = chat_request(request), reasoning_wish(request)
        count = await count_tokens(chat, inference, inference.chat_format, wish, exchange.body_size, exchange.tenant)
        await exchange.respond(_encode(TokenCount(input_tokens=count)), {"content-type": "application/json"})


class MessageJob(ConversationJob):
    def __init__(self, request: MessagesRequest, inference: Inference) -> None:
        most, given = inference.settings.max_stop_sequences, len(request.stop_sequences or ())
        if given > most:
            raise InvalidRequest(
                f"`stop_sequences` supports up to {most} (--max-stop-sequences). Given: {given}", "stop_sequences"
            )
        super().__init__(chat_request(request), inference, inference.chat_format, reasoning_wish(request))
        self._id = f"msg_{new_hex(24)}"
        self._model = request.model

    def answer(self, choices: list[Choice], billed: list[Choice]) -> bytes:
        (choice,) = choices
        parser = self.parser_of_all()
        events = parser.feed(piece.text for piece in choice.pieces) + parser.finish()
        return _encode(self.message(choice, blocks_of(events), stop_reason(choice, parser)))

    def message(self, choice: Choice, content: list[ContentBlock], reason: StopReason | None) -> AssistantMessage:
        return AssistantMessage(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=choice.stream.transcript.stop_string if reason == "stop_sequence" else None,
            usage=usage_of(choice),
        )

    def writer(self, choices: list[Choice]) -> MessageWriter:
        return MessageWriter(self, choices[0])


class MessageWriter:
    def __init__(self, job: MessageJob, choice: Choice) -> None:
        self._job = job
        self._choice = choice
        self._parser = job.parser_of_all()
        self._blocks = BlockEvents()
        self._started = False

    def write(self, choice: Choice, pieces: list[Piece]) -> bytes:
        return self._start() + self._blocks.write(self._parser.feed(piece.text for piece in pieces))

    def _start(self) -> bytes:
        """With the first token, unless that takes long: by then it is known how much of the prompt was cached. What is
        true in any case comes with the end."""
        if self._started:
            return b""
        self._started = True
        return named_event(MessageStart(message=self._job.message(self._choice, [], None)))

    def end(self) -> bytes:
        last = self._blocks.write(self._parser.finish())
        reason = stop_reason(self._choice, self._parser)
        found = self._choice.stream.transcript.stop_string if reason == "stop_sequence" else None
        end = MessageEnd(stop_reason=reason, stop_sequence=found)
        delta = MessageDelta(delta=end, usage=usage_of(self._choice))
        return last + self._blocks.end() + named_event(delta) + named_event(MessageStop())

    def fail(self, error: RequestError) -> bytes:
        return errors.event(error)

    def silence(self) -> bytes:
        """Clients give up on streams without events: Claude Code after five minutes."""
        return self._start() or named_event(Ping())


def stop_reason(choice: Choice, parser: AnswerParser) -> StopReason:
    """An answer that was cut off may have cut off a call, so its length comes first."""
    transcript = choice.stream.transcript
    if transcript.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    if parser.has_calls:
        return "tool_use"
    return "end_turn" if transcript.stop_string is None else "stop_sequence"


def usage_of(choice: Choice) -> MessagesUsage:
    stream = choice.stream
    return MessagesUsage(
        input_tokens=stream.input_len - stream.num_cached,
        cache_read_input_tokens=stream.num_cached,
        output_tokens=choice.num_tokens,
    )
