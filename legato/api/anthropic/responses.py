"""Response bodies of Anthropic's routes, and the events of their streams."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(Struct, kw_only=True):
    # Of the prompt, those that were not in the prefix cache.
    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(Struct, kw_only=True, tag="text"):
    text: str


class ThinkingBlock(Struct, kw_only=True, tag="thinking"):
    thinking: str
    # Clients send it back. It means nothing here.
    signature: str


class ToolUseBlock(Struct, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AssistantMessage(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    # Null in the first event of a stream.
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(Struct, kw_only=True):
    input_tokens: int


# ---- events ----------------------------------------------------------------------------------------------------------


class MessageStart(Struct, kw_only=True, tag="message_start"):
    message: AssistantMessage


class BlockStart(Struct, kw_only=True, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(Struct, kw_only=True, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, kw_only=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, kw_only=True, tag="signature_delta"):
    """Sent before the end of a thinking block."""

    signature: str


class InputJsonDelta(Struct, kw_only=True, tag="input_json_delta"):
    """Concatenated, these parts are the JSON of the input."""

    partial_json: str


class BlockDelta(Struct, kw_only=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, kw_only=True, tag="content_block_stop"):
    index: int


class MessageEnd(Struct, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, kw_only=True, tag="message_delta"):
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(Struct, kw_only=True, tag="message_stop"):
    pass


class Ping(Struct, kw_only=True, tag="ping"):
    """Sent while there are no other events."""


class AnthropicErrorDetails(Struct, kw_only=True):
    # What clients go by.
    error_code: str


class AnthropicErrorObject(Struct, kw_only=True):
    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicError(Struct, kw_only=True, tag="error"):
    error: AnthropicErrorObject


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | AnthropicError
