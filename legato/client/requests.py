"""Request bodies, and the keyword arguments that they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from legato.client.types import Grammar, Message

# The default of TGI's client.
MAX_NEW_TOKENS = 20


class Parameters(TypedDict, total=False):
    """Of generate and generate_stream. `None` means the server's default everywhere."""

    best_of: int | None
    temperature: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    top_k: int | None
    top_p: float | None
    typical_p: float | None
    min_p: float | None
    do_sample: bool
    # 20 if not given; None is as many as fit.
    max_new_tokens: int | None
    return_full_text: bool | None
    stop: list[str] | None
    # The older name of `stop`.
    stop_sequences: list[str] | None
    truncate: int | None
    watermark: bool
    decoder_input_details: bool
    seed: int | None
    top_n_tokens: int | None
    grammar: Grammar | Mapping[str, Any] | None
    adapter_id: str | None
    logit_bias: Mapping[int, float] | None
    ignore_eos: bool


class OpenAIParameters(TypedDict, total=False):
    """Of chat and completion."""

    model: str | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    max_tokens: int | None
    n: int | None
    seed: int | None
    stop: str | list[str] | None
    temperature: float | None
    top_p: float | None
    stream_options: Mapping[str, Any] | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    ignore_eos: bool | None
    min_tokens: int | None
    stop_token_ids: list[int] | None
    response_format: Mapping[str, Any] | None
    echo: bool | None


class CompletionParameters(OpenAIParameters, total=False):
    best_of: int | None
    logprobs: int | None


class ChatParameters(OpenAIParameters, total=False):
    logprobs: bool | None
    top_logprobs: int | None
    max_completion_tokens: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    tool_prompt: str | None
    parallel_tool_calls: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    documents: Sequence[Mapping[str, Any]] | None


Messages = Sequence[Message | Mapping[str, Any]]
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


def generate_body(prompt: str, given: Parameters) -> bytes:
    parameters: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, **given, "details": True}
    stop = parameters.pop("stop_sequences", None)
    if stop is not None:
        parameters.setdefault("stop", stop)
    return msgspec.json.encode({"inputs": prompt, "parameters": parameters})


def chat_body(messages: Messages, given: ChatParameters, stream: bool) -> bytes:
    return msgspec.json.encode({"messages": messages, **given, "stream": stream})


def completion_body(prompt: Prompt, given: CompletionParameters, stream: bool) -> bytes:
    return msgspec.json.encode({"prompt": prompt, **given, "stream": stream})
