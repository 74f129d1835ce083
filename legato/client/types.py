"""What the server answers. The names and fields are those of TGI's client; fields that a server leaves out are None."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct

# ---- the native API --------------------------------------------------------------------------------------------------


class FinishReason(StrEnum):
    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class GrammarType(StrEnum):
    JSON = "json"
    REGEX = "regex"
    JSON_SCHEMA = "json_schema"


class Grammar(Struct):
    """What a text must look like, for the parameter `grammar`."""

    type: GrammarType
    value: str | dict[str, Any]


class InputToken(Struct):
    id: int
    text: str
    # None for the first token, which nothing predicts.
    logprob: float | None = None


class Token(Struct):
    id: int
    text: str
    logprob: float | None = None
    special: bool = False


class BestOfSequence(Struct):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = None
    prefill: list[InputToken] = []
    tokens: list[Token] = []
    top_tokens: list[list[Token]] | None = None


class Details(Struct):
    finish_reason: FinishReason
    generated_tokens: int
    # None when nothing was random.
    seed: int | None = None
    prefill: list[InputToken] = []
    tokens: list[Token] = []
    top_tokens: list[list[Token]] | None = None
    best_of_sequences: list[BestOfSequence] | None = None


class Response(Struct):
    generated_text: str
    details: Details


class StreamDetails(Struct):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = None
    input_length: int | None = None


class StreamResponse(Struct):
    """One token. The last one has the whole text and the details."""

    token: Token
    index: int | None = None
    top_tokens: list[Token] | None = None
    generated_text: str | None = None
    details: StreamDetails | None = None


class Info(Struct):
    model_id: str
    max_input_tokens: int
    max_total_tokens: int
    version: str
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    max_concurrent_requests: int | None = None
    max_best_of: int | None = None
    max_stop_sequences: int | None = None
    validation_workers: int | None = None
    max_client_batch_size: int | None = None
    router: str | None = None
    sha: str | None = None
    docker_label: str | None = None


# ---- OpenAI's API ----------------------------------------------------------------------------------------------------


class Function(Struct):
    """A call: in the chunks of a stream the name comes once and the arguments piece by piece."""

    name: str | None = None
    # JSON.
    arguments: str | None = None


class ToolCall(Struct):
    id: str
    function: Function
    type: str = "function"


class ChoiceDeltaToolCall(Struct):
    index: int
    function: Function
    id: str | None = None
    type: str | None = None


class Message(Struct, omit_defaults=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class ChatCompletionComplete(Struct):
    index: int
    message: Message
    finish_reason: str
    logprobs: dict[str, Any] | None = None


class ChatComplete(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatCompletionComplete]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None


class ChoiceDelta(Struct):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ChoiceDeltaToolCall] | None = None


class Choice(Struct):
    index: int
    delta: ChoiceDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[Choice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | None = None


class CompletionComplete(Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    # None until the last chunk of a stream.
    finish_reason: str | None = None


class Completion(Struct):
    """The answer, or in a stream a piece of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionComplete]
    object: str = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | None = None
