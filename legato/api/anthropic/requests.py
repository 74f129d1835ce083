"""Request bodies of Anthropic's routes. Unknown fields and tools that run on Anthropic's servers are ignored.

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
        dict[str, Any] | None,
        Meta(
            description="JSON schema of an object. Tools without a schema run on Anthropic's servers and are ignored."
        ),
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
        Tokens | None, Meta(description="Maximum reasoning tokens; after that the end of the reasoning is forced.")
    ] = None


class OutputFormat(Struct, kw_only=True, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, frozen=True):
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Meta(description="How much a reasoning model reasons."),
    ] = None
    format: Annotated[OutputFormat | None, Meta(description="Format that the text must have.")] = None


class CountTokensRequest(Struct, kw_only=True, frozen=True):
    """Fields of both routes: everything that determines the prompt."""

    model: Annotated[str, Meta(description="Any name, or the name of a LoRA adapter; the response repeats it.")]
    messages: Annotated[list[MessageParam], Meta(min_length=1, description="The conversation.")]
    system: Annotated[
        str | list[Block] | None,
        Meta(description="The system prompt. Lines that begin with `x-anthropic-billing-header:` are dropped."),
    ] = None
    tools: Annotated[
        list[MessagesTool] | None, Meta(description="Tools that the model may call; the client runs them.")
    ] = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Annotated[
        ThinkingParam | None,
        Meta(description="Whether a reasoning model reasons before it answers. Default: it does not."),
    ] = None
    output_config: OutputConfig | None = None
    thread: Annotated[
        Any, Meta(description="Not supported: refused unless null; clients then send whole conversations.")
    ] = None


class MessagesRequest(CountTokensRequest, kw_only=True, frozen=True):
    max_tokens: Annotated[Tokens, Meta(description="Maximum generated tokens, reasoning included.")]
    stop_sequences: Annotated[list[str] | None, Meta(description="Stop strings; the text ends before them.")] = None
    stream: Annotated[bool | None, Meta(description="Stream the text as server-sent events.")] = False
    temperature: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Divides the logits before sampling. Default: 1.0; 0 is greedy decoding."),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="Sample from the most likely tokens that together reach this probability."),
    ] = None
    top_k: Annotated[TopK | None, Meta(description="Sample from the k most likely tokens.")] = None
