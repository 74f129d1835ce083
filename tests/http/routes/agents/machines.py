"""The order of events as the published schemas of both APIs have it, as state machines that refuse everything else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


def events_of(body: bytes) -> list[Event]:
    """Of a stream whose events have names, which are their types. Comments are left out."""
    events = []
    for frame in body.split(b"\n\n"):
        if not frame or frame == b":":
            continue
        name, data = frame.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        events.append(event)
    return events


@dataclass
class MessageMachine:
    """Anthropic's: a message has blocks, one after the other, and an end."""

    state: str = "new"
    block: str = ""
    num_blocks: int = 0
    signed: bool = False
    kinds: list[str] = field(default_factory=list)

    def take(self, event: Event) -> None:
        kind = event["type"]
        if kind == "ping":
            assert self.state not in ("new", "over")
        elif kind == "error":
            assert self.state != "over"
            self.state = "over"
        else:
            getattr(self, f"_{kind}")(event)

    def _message_start(self, event: Event) -> None:
        assert self.state == "new"
        message = event["message"]
        assert (message["content"], message["stop_reason"]) == ([], None)
        self.state = "between"

    def _content_block_start(self, event: Event) -> None:
        assert (self.state, event["index"]) == ("between", self.num_blocks)
        self.state, self.block, self.signed = "inside", event["content_block"]["type"], False
        self.num_blocks += 1
        self.kinds.append(self.block)

    def _content_block_delta(self, event: Event) -> None:
        assert (self.state, event["index"]) == ("inside", self.num_blocks - 1)
        delta = event["delta"]["type"]
        allowed = {"text": {"text_delta"}, "tool_use": {"input_json_delta"}}
        assert delta in allowed.get(self.block, {"thinking_delta", "signature_delta"}) and not self.signed
        self.signed = delta == "signature_delta"

    def _content_block_stop(self, event: Event) -> None:
        assert (self.state, event["index"]) == ("inside", self.num_blocks - 1)
        assert self.signed == (self.block == "thinking")
        self.state = "between"

    def _message_delta(self, event: Event) -> None:
        assert self.state == "between"
        reason = event["delta"]["stop_reason"]
        assert reason in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
        assert reason != "tool_use" or "tool_use" in self.kinds
        self.state = "ending"

    def _message_stop(self, event: Event) -> None:
        assert self.state == "ending"
        self.state = "over"


# type of the item -> its events between `output_item.added` and `output_item.done`, the first of them repeated
_PATHS = {
    "message": ["content_part.added", "output_text.delta*", "output_text.done", "content_part.done"],
    "reasoning": ["content_part.added", "reasoning_text.delta*", "reasoning_text.done", "content_part.done"],
    "summary": [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta*",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ],
    "function_call": ["function_call_arguments.delta*", "function_call_arguments.done"],
    "custom_tool_call": ["custom_tool_call_input.delta*", "custom_tool_call_input.done"],
}


@dataclass
class ResponseMachine:
    """OpenAI's: a response has items, one after the other; every event has the next number."""

    state: str = "new"
    number: int = 0
    items: list[Event] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    text: str = ""
    as_summary: bool = False

    def take(self, event: Event) -> None:
        assert event["sequence_number"] == self.number
        self.number += 1
        kind = event["type"].removeprefix("response.")
        if kind in ("created", "in_progress"):
            # While a prompt is being read, it is said again.
            assert self.state == "new" if kind == "created" else self.state in ("created", "between") and not self.items
            assert event["response"]["status"] == "in_progress" and event["response"]["output"] == []
            self.state = "created" if kind == "created" else "between"
        elif kind in ("completed", "incomplete", "failed"):
            self._end(kind, event["response"])
        elif kind == "output_item.added":
            self._begin(event)
        elif kind == "output_item.done":
            self._done(event)
        else:
            self._inside(kind, event)

    def _end(self, kind: str, response: Event) -> None:
        assert self.state == "between" or (kind == "failed" and self.state == "inside")
        assert response["status"] == kind
        if kind != "failed":
            assert response["output"] == self.items
            assert response["usage"]["total_tokens"] > 0
        assert (response["error"] is not None) == (kind == "failed")
        assert (response["incomplete_details"] is not None) == (kind == "incomplete")
        self.state = "over"

    def _begin(self, event: Event) -> None:
        assert (self.state, event["output_index"]) == ("between", len(self.items))
        kind = event["item"]["type"]
        self.path = list(_PATHS["summary" if self.as_summary and kind == "reasoning" else kind])
        self.state, self.text = "inside", ""

    def _inside(self, kind: str, event: Event) -> None:
        assert (self.state, event["output_index"]) == ("inside", len(self.items))
        if self.path[0] == f"{kind}*":
            self.text += event["delta"]
            return
        if self.path[0].endswith("*"):
            del self.path[0]
        assert self.path.pop(0) == kind
        if kind.endswith("text.done"):
            assert event["text"] == self.text
        elif kind.endswith("arguments.done") or kind.endswith("input.done"):
            assert event.get("arguments", event.get("input")) == self.text

    def _done(self, event: Event) -> None:
        assert (self.state, event["output_index"], self.path) == ("inside", len(self.items), [])
        self.items.append(event["item"])
        self.state = "between"
