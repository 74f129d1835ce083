"""Response bodies of OpenAI's routes. `chunks.py` writes the chunks; their structs say what it must come to."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from legato.api.native import SimpleToken

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(Struct, kw_only=True):
    # Tokens that were in the prefix cache.
    cached_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    # Tokens that were guessed, by speculation, and were right.
    accepted_prediction_tokens: int
    # Tokens of what the model said to itself; only of models that do.
    reasoning_tokens: int | UnsetType = UNSET


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


# ---- completions -----------------------------------------------------------------------------------------------------


class CompletionLogprobs(Struct, kw_only=True):
    """Four parallel lists with one entry per token."""

    tokens: list[str]
    # Null for the first token of a prompt, which nothing predicts.
    token_logprobs: list[float | None]
    # The most likely tokens and the one that was chosen.
    top_logprobs: list[dict[str, float] | None]
    # Where the token begins in the text, in characters.
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    # Null until the last chunk of a stream.
    finish_reason: FinishReason | None


class Completion(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    # Only with `stream_options.include_usage`: null until the last chunk.
    usage: Usage | UnsetType | None = UNSET


# ---- chat ------------------------------------------------------------------------------------------------------------


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    # The UTF-8 bytes of the token; characters may be spread over several tokens.
    bytes: list[int]


class TokenLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct, kw_only=True):
    name: str
    # JSON.
    arguments: str


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    # Null where there is nothing but calls.
    content: str | None
    refusal: None = None
    # The same under both names that clients look for; only where the model reasoned.
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    # All of them, one after the other, are JSON.
    arguments: str


class ToolCallDelta(Struct, kw_only=True):
    """Id, type and name are sent once, with the first delta of a call."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    # Only with `stream_options.include_usage`: null until the last chunk.
    usage: Usage | UnsetType | None = UNSET


class ChatTokenizeResponse(Struct, kw_only=True):
    tokenize_response: list[SimpleToken]
    # What the chat template made of the messages.
    templated_text: str


# ---- models and errors -----------------------------------------------------------------------------------------------


class ModelObject(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    # Of a LoRA adapter: where it came from, and the base model.
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    # Of a server that does not generate: what it does.
    task: Literal["embed"] | UnsetType = UNSET


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class ErrorObject(Struct, kw_only=True):
    message: str
    type: str
    # The field that is wrong, where one is.
    param: str | None
    code: str | None


class OpenAIError(Struct, kw_only=True):
    error: ErrorObject
    # What TGI's clients look for.
    error_type: str
