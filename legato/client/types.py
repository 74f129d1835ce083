"""What the server answers: structs of `legato.api` where they fit, and more tolerant ones where servers leave fields
out, which are None then. The aliases at the end are the names of TGI's client."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct

from legato.api.native import Info, StreamDetails, Token
from legato.api.native import PrefillToken as InputToken
from legato.api.openai.responses import CalledFunction as Function
from legato.api.openai.responses import PromptTokensDetails, ToolCall
from legato.scheduling.state import FinishReason

# ---- the native API --------------------------------------------------------------------------------------------------


class GrammarFormat(StrEnum):
    JSON = "json"
    REGEX = "regex"
    JSON_SCHEMA = "json_schema"


class GrammarParameter(Struct):
    """The parameter `grammar`: what the text must look like."""

    type: GrammarFormat
    value: str | dict[str, Any]


class SequenceDetails(Struct, kw_only=True):
    finish_reason: FinishReason
    generated_tokens: int
    # None without sampling.
    seed: int | None = None
    prefill: list[InputToken] = []
    tokens: list[Token] = []
    top_tokens: list[list[Token]] | None = None


class AlternativeSequence(SequenceDetails, kw_only=True):
    generated_text: str


class GenerationDetails(SequenceDetails, kw_only=True):
    best_of_sequences: list[AlternativeSequence] | None = None


class Response(Struct):
    generated_text: str
    details: GenerationDetails


class StreamItem(Struct):
    """One token. The last one has the whole text and the details."""

    token: Token
    index: int | None = None
    top_tokens: list[Token] | None = None
    generated_text: str | None = None
    details: StreamDetails | None = None


# ---- OpenAI's API ----------------------------------------------------------------------------------------------------


class StreamedFunction(Struct):
    """A call in the chunks of a stream: the name comes once, the arguments (JSON) in pieces."""

    name: str | None = None
    arguments: str | None = None


class ChoiceDeltaToolCall(Struct):
    index: int
    function: StreamedFunction
    id: str | None = None
    type: str | None = None


class ChatTurn(Struct, omit_defaults=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class TokenUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ChatCompletionComplete(Struct):
    index: int
    message: ChatTurn
    finish_reason: str
    logprobs: dict[str, Any] | None = None


class ChoiceDelta(Struct):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ChoiceDeltaToolCall] | None = None


class ChunkChoice(Struct):
    index: int
    delta: ChoiceDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class CompletionComplete(Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    # None until the last chunk of a stream.
    finish_reason: str | None = None


class OpenAIAnswer(Struct, kw_only=True):
    """Fields of every answer and of every chunk of a stream."""

    id: str
    created: int
    model: str
    object: str
    system_fingerprint: str | None = None
    usage: TokenUsage | None = None


class ChatComplete(OpenAIAnswer, kw_only=True):
    choices: list[ChatCompletionComplete]
    usage: TokenUsage


class ChatChunk(OpenAIAnswer, kw_only=True):
    choices: list[ChunkChoice]


class TextCompletion(OpenAIAnswer, kw_only=True):
    """The answer, or in a stream a piece of it."""

    choices: list[CompletionComplete]


# ---- TGI's names -----------------------------------------------------------------------------------------------------

GrammarType = GrammarFormat
Grammar = GrammarParameter
BestOfSequence = AlternativeSequence
Details = GenerationDetails
StreamResponse = StreamItem
Message = ChatTurn
Usage = TokenUsage
Choice = ChunkChoice
ChatCompletionChunk = ChatChunk
Completion = TextCompletion

__all__ = [
    "BestOfSequence",
    "ChatComplete",
    "ChatCompletionChunk",
    "ChatCompletionComplete",
    "Choice",
    "ChoiceDelta",
    "ChoiceDeltaToolCall",
    "Completion",
    "CompletionComplete",
    "Details",
    "FinishReason",
    "Function",
    "Grammar",
    "GrammarType",
    "Info",
    "InputToken",
    "Message",
    "Response",
    "StreamDetails",
    "StreamResponse",
    "Token",
    "ToolCall",
    "Usage",
]
