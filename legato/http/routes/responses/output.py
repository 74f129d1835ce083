"""The parts of an answer as items of a response, and the events that tell of them while they grow.

    output_item.added ─► content_part.added ─► output_text.delta* ─► output_text.done ─► content_part.done
                                                                                     ─► output_item.done

Reasoning and calls have events of their own in the middle. One item is open at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Protocol

import msgspec
from msgspec import UNSET

from legato.api.openai.responses import TokenLogprob
from legato.api.responses import events as ev
from legato.api.responses.items import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from legato.chat.tools.parser import CallBegins, CallGoesOn, Content, Event, Thought
from legato.common.identity import new_hex
from legato.http.routes.responses.tools import INPUT, ResponseTools
from legato.http.routes.responses.translation import encrypted

Events = Iterator[ev.ResponseEvent]


class Place:
    """Where the events of one item belong: its number, and the next number of an event."""

    def __init__(self, index: int, numbers: Iterator[int]) -> None:
        self.index = index
        self._numbers = numbers

    @property
    def number(self) -> int:
        return next(self._numbers)


class GrowingItem(Protocol):
    """An item in the making. `item` is what it is by now."""

    @property
    def item(self) -> OutputItem: ...

    def begin(self) -> Events: ...

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Events: ...

    def end(self, status: ItemStatus) -> Events: ...


class GrowingMessage:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._part = OutputText(text="", annotations=[], logprobs=[])
        self.item = OutputMessage(id=new_id("msg"), status="in_progress", content=[])
        self._where = {"item_id": self.item.id, "output_index": place.index, "content_index": 0}

    def begin(self) -> Events:
        yield ev.OutputItemAdded(sequence_number=self._place.number, output_index=self._place.index, item=self.item)
        yield ev.ContentPartAdded(sequence_number=self._place.number, **self._where, part=self._part)  # type: ignore[arg-type]
        self.item.content.append(self._part)

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Events:
        self._part.text += text
        self._part.logprobs += logprobs
        number = self._place.number
        yield ev.OutputTextDelta(sequence_number=number, **self._where, delta=text, logprobs=logprobs)  # type: ignore[arg-type]

    def end(self, status: ItemStatus) -> Events:
        self.item.status = status
        number, part = self._place.number, self._part
        yield ev.OutputTextDone(sequence_number=number, **self._where, text=part.text, logprobs=part.logprobs)  # type: ignore[arg-type]
        yield ev.ContentPartDone(sequence_number=self._place.number, **self._where, part=part)  # type: ignore[arg-type]
        yield ev.OutputItemDone(sequence_number=self._place.number, output_index=self._place.index, item=self.item)


class GrowingReasoning:
    def __init__(self, place: Place, *, as_summary: bool, encrypt: bool) -> None:
        self._place = place
        self._as_summary = as_summary
        self._encrypt = encrypt
        self._text = ""
        self.item = ReasoningItem(id=new_id("rs"), status="in_progress", summary=[], content=[])
        index = "summary_index" if as_summary else "content_index"
        self._where = {"item_id": self.item.id, "output_index": place.index, index: 0}

    def begin(self) -> Events:
        yield ev.OutputItemAdded(sequence_number=self._place.number, output_index=self._place.index, item=self.item)
        number = self._place.number
        if self._as_summary:
            yield ev.SummaryPartAdded(sequence_number=number, **self._where, part=SummaryText(text=""))  # type: ignore[arg-type]
        else:
            yield ev.ContentPartAdded(sequence_number=number, **self._where, part=ReasoningText(text=""))  # type: ignore[arg-type]

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Events:
        self._text += text
        kind = ev.SummaryTextDelta if self._as_summary else ev.ReasoningTextDelta
        yield kind(sequence_number=self._place.number, **self._where, delta=text)  # type: ignore[arg-type]

    def end(self, status: ItemStatus) -> Events:
        text, number = self._text, self._place.number
        if self._as_summary:
            self.item.summary = [SummaryText(text=text)]
            yield ev.SummaryTextDone(sequence_number=number, **self._where, text=text)  # type: ignore[arg-type]
            part = self.item.summary[0]
            yield ev.SummaryPartDone(sequence_number=self._place.number, **self._where, part=part)  # type: ignore[arg-type]
        else:
            self.item.content = [ReasoningText(text=text)]
            yield ev.ReasoningTextDone(sequence_number=number, **self._where, text=text)  # type: ignore[arg-type]
            said = self.item.content[0]
            yield ev.ContentPartDone(sequence_number=self._place.number, **self._where, part=said)  # type: ignore[arg-type]
        self.item.status = status
        if self._encrypt:
            self.item.encrypted_content = encrypted(text)
        yield ev.OutputItemDone(sequence_number=self._place.number, output_index=self._place.index, item=self.item)


class GrowingCall:
    def __init__(self, place: Place, call: CallBegins, tools: ResponseTools) -> None:
        self._place = place
        space, name = tools.spaces.get(call.name, (None, call.name))
        self.item = FunctionCallItem(
            id=new_id("fc"), call_id=call.id, name=name, arguments="", status="in_progress", namespace=space or UNSET
        )
        self._where = {"item_id": self.item.id, "output_index": place.index}

    def begin(self) -> Events:
        yield ev.OutputItemAdded(sequence_number=self._place.number, output_index=self._place.index, item=self.item)

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Events:
        self.item.arguments += text
        yield ev.ArgumentsDelta(sequence_number=self._place.number, **self._where, delta=text)  # type: ignore[arg-type]

    def end(self, status: ItemStatus) -> Events:
        self.item.status = status
        number, item = self._place.number, self.item
        yield ev.ArgumentsDone(sequence_number=number, **self._where, name=item.name, arguments=item.arguments)  # type: ignore[arg-type]
        yield ev.OutputItemDone(sequence_number=self._place.number, output_index=self._place.index, item=item)


class GrowingCustomCall:
    """The model writes a string in JSON. What it says is known when it is complete."""

    def __init__(self, place: Place, call: CallBegins) -> None:
        self._place = place
        self._arguments = ""
        self.item = CustomCallItem(id=new_id("ctc"), call_id=call.id, name=call.name, input="", status="in_progress")
        self._where = {"item_id": self.item.id, "output_index": place.index}

    def begin(self) -> Events:
        yield ev.OutputItemAdded(sequence_number=self._place.number, output_index=self._place.index, item=self.item)

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Events:
        self._arguments += text
        return iter(())

    def end(self, status: ItemStatus) -> Events:
        text = _input(self._arguments)
        self.item.input, self.item.status = text, status
        yield ev.CustomInputDelta(sequence_number=self._place.number, **self._where, delta=text)  # type: ignore[arg-type]
        yield ev.CustomInputDone(sequence_number=self._place.number, **self._where, input=text)  # type: ignore[arg-type]
        yield ev.OutputItemDone(sequence_number=self._place.number, output_index=self._place.index, item=self.item)


def _input(arguments: str) -> str:
    """The text as the model wrote it, if it is not in the requested form."""
    try:
        found = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


class ResponseOutput:
    """All items of a response. Numbers of events run on from one to the next."""

    def __init__(self, tools: ResponseTools, *, as_summary: bool, encrypt: bool) -> None:
        self._tools = tools
        self._as_summary = as_summary
        self._encrypt = encrypt
        self.numbers = count()
        self._grown: list[OutputItem] = []
        self._open: GrowingItem | None = None
        self._kind: type[Event] | None = None

    @property
    def items(self) -> list[OutputItem]:
        """Those that are complete, and the one that is growing."""
        return [*self._grown, *([] if self._open is None else [self._open.item])]

    def add(self, events: list[Event], logprobs: list[TokenLogprob] | None = None) -> Events:
        """`logprobs` are of the text among them."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._grow(Content, text, logprobs or [])
                    logprobs = None
                case Thought(text):
                    yield from self._grow(Thought, text, [])
                case CallBegins(_, _, name):
                    custom = name in self._tools.custom
                    place = self._next_place()
                    call = GrowingCustomCall(place, event) if custom else GrowingCall(place, event, self._tools)
                    yield from self._begin(CallGoesOn, call)
                case CallGoesOn(_, more):
                    assert self._open is not None, "a call begins before it goes on"
                    yield from self._open.add(more, [])

    def end(self, status: ItemStatus) -> Events:
        """Of the item that is open."""
        if self._open is not None:
            grown, self._open, self._kind = self._open, None, None
            yield from grown.end(status)
            self._grown.append(grown.item)

    def _grow(self, kind: type[Content | Thought], text: str, logprobs: list[TokenLogprob]) -> Events:
        if self._kind is not kind:
            place = self._next_place()
            reasoning = kind is Thought
            item: GrowingItem = (
                GrowingReasoning(place, as_summary=self._as_summary, encrypt=self._encrypt)
                if reasoning
                else GrowingMessage(place)
            )
            yield from self._begin(kind, item)
        assert self._open is not None, "an item was begun"
        yield from self._open.add(text, logprobs)

    def _begin(self, kind: type[Event], item: GrowingItem) -> Events:
        yield from self.end("completed")
        self._open, self._kind = item, kind
        yield from item.begin()

    def _next_place(self) -> Place:
        return Place(len(self.items), self.numbers)


def new_id(prefix: str) -> str:
    return f"{prefix}_{new_hex()}"
