"""Request body of `POST /v1/responses`. Unknown fields and tools that run on OpenAI's servers are ignored.

Types are checked while parsing, items where they are translated (`http/routes/responses/translation.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from legato.api.native import none_for_null

# An item of the conversation. Which fields it has depends on its type, which is `message` if it has none.
InputItem = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "properties": {
                "type": {
                    "type": "string",
                    "examples": ["message", "function_call", "function_call_output", "reasoning", "custom_tool_call"],
                }
            }
        }
    ),
]
ResponseTool = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"required": ["type"], "properties": {"type": {"type": "string"}}}),
]


class TextOptions(Struct, kw_only=True, frozen=True):
    format: Annotated[
        Raw,  # decoded when its size is known
        Meta(
            extra_json_schema={
                "anyOf": [
                    {
                        "type": "object",
                        "required": ["type"],
                        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
                    },
                    {"type": "null"},
                ]
            },
            description="Format that the text must have: `text`, `json_object`, or `json_schema` with a `schema`.",
        ),
    ] = None  # type: ignore[assignment]
    verbosity: Annotated[str | None, Meta(description="Accepted and ignored.")] = None

    def __post_init__(self) -> None:
        none_for_null(self, "format")


class ReasoningOptions(Struct, kw_only=True, frozen=True):
    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Meta(description="Same as `reasoning_effort` of chat completions."),
    ] = None
    summary: Annotated[
        Literal["auto", "concise", "detailed", "none"] | None,
        Meta(description="If set, the full reasoning is returned as the summary instead of as `reasoning_text`."),
    ] = None


class ResponsesRequest(Struct, kw_only=True, frozen=True):
    input: Annotated[str | list[InputItem], Meta(description="A user message as text, or the items of a conversation.")]
    model: Annotated[
        str | None, Meta(description="Any name, or the name of a LoRA adapter; the response repeats it.")
    ] = None
    instructions: Annotated[
        str | None, Meta(description="The system prompt. A response that continues this one does not inherit it.")
    ] = None
    previous_response_id: Annotated[str | None, Meta(description="Id of the stored response to continue.")] = None
    store: Annotated[
        bool | None, Meta(description="Keep the response for `GET` and `previous_response_id`. Default: true.")
    ] = None
    background: Annotated[
        bool | None, Meta(description="Respond at once and generate in the background; needs `store`.")
    ] = False
    stream: Annotated[bool | None, Meta(description="Stream the response as server-sent events.")] = False
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**32 - 1)] | None,
        Meta(description="Maximum generated tokens, reasoning included. Default: as many as fit."),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Divides the logits before sampling. Default: 1.0; 0 is greedy decoding."),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Sample from the most likely tokens that together reach this probability."),
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        Meta(
            description="With `message.output_text.logprobs` in `include`: also return the logprobs of this many most"
            " likely tokens."
        ),
    ] = None
    tools: Annotated[
        list[ResponseTool] | None,
        Meta(description="Functions and custom tools that the model may call; the client runs them."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(
            description='`auto`, `none`, `required`, or the tool to call: `{"type": "function", "name": ...}`; '
            '`{"type": "allowed_tools", ...}` for some of them. A forced call follows the tool\'s schema.'
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Whether one response may call several tools. Default: the model decides.")
    ] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[
        list[str] | None,
        Meta(description="`reasoning.encrypted_content`, `message.output_text.logprobs`; others are ignored."),
    ] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Stored with the response.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Meta(description="Conversations that are too long are refused, never truncated."),
    ] = None
    user: Annotated[str | None, Meta(description="Returned in the response, otherwise ignored.")] = None
    prompt: Annotated[Any, Meta(description="Not supported: refused unless null.")] = None
    conversation: Annotated[Any, Meta(description="Not supported: refused unless null.")] = None
