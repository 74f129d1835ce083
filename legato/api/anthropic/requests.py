"""The JSON that Anthropic's routes take. Unknown fields are ignored, and so are kinds of tools that run elsewhere.

Types are checked while parsing, blocks of content where they are translated (`http/routes/anthropic/translation.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

# What every block has, for the reader of the documentation. The rest depends on its type.
Block = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "required": ["type"],
            "properties": {
                "type": {
                    "type": "string",
                    "examples": ["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"],
                }
            },
        }
    ),
]
Tokens = Annotated[int, Meta(ge=1, le=2**32 - 1)]
TopK = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class MessageParam(Struct, kw_only=True, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(Struct, kw_only=True, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    input_schema: Annotated[
        dict[str, Any] | None, Meta(description="Of an object. Tools without one run on Anthropic's servers: ignored.")
    ] = None
    type: str | None = None


class MessagesToolChoice(Struct, kw_only=True, frozen=True):
    type: Annotated[
        Literal["auto", "any", "tool", "none"],
        Meta(description="`any` and `tool` (with `name`) force a call that follows the tool's schema."),
    ]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Struct, kw_only=True, frozen=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[
        Tokens | None, Meta(description="At most this many tokens of reasoning; then the model has to answer.")
    ] = None


class OutputFormat(Struct, kw_only=True, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, frozen=True):
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Meta(description="How much the model may reason, if it does so at all."),
    ] = None
    format: Annotated[OutputFormat | None, Meta(description="What the text must look like.")] = None


class CountTokensRequest(Struct, kw_only=True, frozen=True):
    """What both routes take: everything that the prompt depends on."""

    model: Annotated[str, Meta(description="Any name: there is one model, and the answer repeats it.")]
    messages: Annotated[list[MessageParam], Meta(min_length=1, description="The conversation.")]
    system: Annotated[
        str | list[Block] | None,
        Meta(description="The system prompt. Lines that begin with `x-anthropic-billing-header:` are dropped."),
    ] = None
    tools: Annotated[list[MessagesTool] | None, Meta(description="What the model may call; the client runs it.")] = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Annotated[
        ThinkingParam | None,
        Meta(description="Whether a model that can reason does so before it answers. Not if this is not given."),
    ] = None
    output_config: OutputConfig | None = None
    thread: Annotated[Any, Meta(description="Not supported: refused unless null, and clients send everything.")] = None


class MessagesRequest(CountTokensRequest, kw_only=True, frozen=True):
    max_tokens: Annotated[Tokens, Meta(description="At most this many tokens, those of the reasoning included.")]
    stop_sequences: Annotated[list[str] | None, Meta(description="Strings before which the text ends.")] = None
    stream: Annotated[bool | None, Meta(description="Send server-sent events as the text grows.")] = False
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="1.0 if not given; 0 takes the most likely token.")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Sample from the most likely tokens that together reach this probability."),
    ] = None
    top_k: Annotated[TopK | None, Meta(description="Sample from the k most likely tokens.")] = None
