"""The parts of an answer as Anthropic's blocks, in one piece and as events.

message_start ─► (content_block_start ─► content_block_delta* ─► content_block_stop)* ─► message_delta ─► message_stop
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec

from legato.api.anthropic.responses import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from legato.chat.tools.parser import CallBegins, CallGoesOn, Content, Event, Thought
from legato.http.sse import named_event


def signature_of(thinking: str) -> str:
    """Clients want one, and send it back."""
    return base64.b64encode(hashlib.sha256(thinking.encode(errors="replace")).digest()).decode()


def tool_use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"


def blocks_of(events: list[Event]) -> list[ContentBlock]:
    """All of an answer, in its order."""
    blocks: list[ContentBlock] = []
    arguments: dict[int, str] = {}
    calls: dict[int, ToolUseBlock] = {}
    for event in events:
        last = blocks[-1] if blocks else None
        match event:
            case Content(text) if isinstance(last, TextBlock):
                last.text += text
            case Content(text):
                blocks.append(TextBlock(text=text))
            case Thought(text) if isinstance(last, ThinkingBlock):
                last.thinking += text
            case Thought(text):
                blocks.append(ThinkingBlock(thinking=text, signature=""))
            case CallBegins(index, call_id, name):
                calls[index] = ToolUseBlock(id=tool_use_id(call_id), name=name, input={})
                blocks.append(calls[index])
            case CallGoesOn(index, more):
                arguments[index] = arguments.get(index, "") + more
    for index, call in calls.items():
        call.input = _input(arguments.get(index, ""))
    for block in blocks:
        if isinstance(block, ThinkingBlock):
            block.signature = signature_of(block.thinking)
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """A call that was cut off has none."""
    try:
        found = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


class BlockEvents:
    """The events of the blocks of one stream, one block at a time."""

    def __init__(self) -> None:
        self._num_blocks = 0
        # What the open block is; None between blocks.
        self._open: type[Content | Thought | CallGoesOn] | None = None
        self._thinking = ""

    def write(self, events: list[Event]) -> bytes:
        return b"".join([self._write(event) for event in events])

    def end(self) -> bytes:
        """Closes what is open."""
        if self._open is None:
            return b""
        closing = b""
        if self._open is Thought:
            closing = self._delta(SignatureDelta(signature=signature_of(self._thinking)))
        self._open = None
        return closing + named_event(BlockStop(index=self._num_blocks - 1))

    def _write(self, event: Event) -> bytes:
        match event:
            case Content(text):
                begun = self._begin(Content, TextBlock(text=""))
                return begun + self._delta(TextDelta(text=text))
            case Thought(text):
                begun = self._begin(Thought, ThinkingBlock(thinking="", signature=""))
                self._thinking += text
                return begun + self._delta(ThinkingDelta(thinking=text))
            case CallBegins(_, call_id, name):
                return self.end() + self._begin(CallGoesOn, ToolUseBlock(id=tool_use_id(call_id), name=name, input={}))
            case CallGoesOn(_, more):
                return self._delta(InputJsonDelta(partial_json=more))

    def _begin(self, kind: type[Content | Thought | CallGoesOn], block: ContentBlock) -> bytes:
        if self._open is kind:
            return b""
        closed = self.end()
        self._open, self._thinking = kind, ""
        self._num_blocks += 1
        return closed + named_event(BlockStart(index=self._num_blocks - 1, content_block=block))

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta) -> bytes:
        return named_event(BlockDelta(index=self._num_blocks - 1, delta=delta))
