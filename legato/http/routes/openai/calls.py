"""Calls of tools in the shapes of chat completions, in one piece and in many."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from legato.api.openai.responses import (
    CalledFunction,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from legato.chat.answers import AnswerParser
from legato.chat.tools.parser import CallBegins, CallGoesOn, Content, Event, ParsedMessage, Thought
from legato.http.answering import Choice
from legato.http.routes.openai.chunks import ChatChunks
from legato.http.routes.openai.serving import finish_reason_of
from legato.http.streams import Piece


def parsed_message(parser: AnswerParser, pieces: list[Piece]) -> ParsedMessage:
    """The whole text at once."""
    message = ParsedMessage()
    message.add(parser.feed(piece.text for piece in pieces))
    message.add(parser.finish())
    return message


def chat_message(message: ParsedMessage, echo: str) -> ChatMessage:
    calls = [
        ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in message.calls
    ]
    content = echo + message.content
    reasoning = message.reasoning or UNSET
    return ChatMessage(
        content=content if content or not calls else None,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or UNSET,
    )


def call_chunks(chunks: ChatChunks, events: Iterable[Event], logprobs: ChatLogprobs | None) -> list[bytes]:
    """A chunk per event. Logprobs are of tokens, not of events: all of them go with the first."""
    written = []
    if logprobs is not None and logprobs.content:
        written.append(chunks.content("", logprobs))
    for event in events:
        if isinstance(event, Content):
            written.append(chunks.content(event.text))
        else:
            written.append(chunks.reasoning(event.text) if isinstance(event, Thought) else chunks.call(_delta(event)))
    return written


def finish_reason(choice: Choice, parser: AnswerParser | None) -> FinishReason:
    """An answer that was cut off may have cut off a call, so its length comes first."""
    reason = finish_reason_of(choice)
    return "tool_calls" if parser is not None and parser.has_calls and reason == "stop" else reason


def _delta(event: CallBegins | CallGoesOn) -> ToolCallDelta:
    if isinstance(event, CallBegins):
        function = FunctionDelta(name=event.name, arguments="")
        return ToolCallDelta(index=event.index, id=event.id, type="function", function=function)
    return ToolCallDelta(index=event.index, function=FunctionDelta(arguments=event.arguments))
