"""The JSON that `POST /v1/responses` takes. Unknown fields are ignored, and so are kinds of tools that run elsewhere.

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
            description="What the text must look like: `text`, `json_object`, or `json_schema` with a `schema`.",
        ),
    ] = None  # type: ignore[assignment]
    verbosity: Annotated[str | None, Meta(description="Accepted, and not used.")] = None

    def __post_init__(self) -> None:
        none_for_null(self, "format")


class ReasoningOptions(Struct, kw_only=True, frozen=True):
    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Meta(description="As `reasoning_effort` of chat completions."),
    ] = None
    summary: Annotated[
        Literal["auto", "concise", "detailed", "none"] | None,
        Meta(description="With a summary the reasoning comes as one, unabridged, instead of as `reasoning_text`."),
    ] = None


class ResponsesRequest(Struct, kw_only=True, frozen=True):
    input: Annotated[str | list[InputItem], Meta(description="A text of the user, or the items of a conversation.")]
    model: Annotated[str | None, Meta(description="Any name: there is one model, and the answer repeats it.")] = None
    instructions: Annotated[
        str | None, Meta(description="The system prompt. It is not part of what is continued by the next response.")
    ] = None
    previous_response_id: Annotated[str | None, Meta(description="A stored response that this one continues.")] = None
    store: Annotated[
        bool | None, Meta(description="Keep the response for `GET` and `previous_response_id`. Default: true.")
    ] = None
    background: Annotated[
        bool | None, Meta(description="Answer at once, and go on without the client; needs `store`.")
    ] = False
    stream: Annotated[bool | None, Meta(description="Send server-sent events as the response grows.")] = False
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**32 - 1)] | None,
        Meta(description="At most this many tokens, those of the reasoning included; as many as fit if not given."),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="1.0 if not given; 0 takes the most likely token.")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Sample from the most likely tokens that together reach this probability."),
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        Meta(description="With `message.output_text.logprobs` in `include`: of this many most likely tokens, too."),
    ] = None
    tools: Annotated[
        list[ResponseTool] | None,
        Meta(description="Functions and custom tools that the model may call; the client runs them."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(
            description='`auto`, `none`, `required`, or the tool to call: `{"type": "function", "name": ...}`; '
            '`{"type": "allowed_tools", ...}` for some of them. A call that is asked for follows the tool\'s schema.'
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Whether one response may call several tools. Default: as the model is used to.")
    ] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[
        list[str] | None,
        Meta(description="`reasoning.encrypted_content`, `message.output_text.logprobs`; others are ignored."),
    ] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Kept with the response.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Meta(description="Nothing is ever dropped from a conversation that is too long: it is refused."),
    ] = None
    user: Annotated[str | None, Meta(description="Repeated, and not used.")] = None
    prompt: Annotated[Any, Meta(description="Not supported: refused unless null.")] = None
    conversation: Annotated[Any, Meta(description="Not supported: refused unless null.")] = None
