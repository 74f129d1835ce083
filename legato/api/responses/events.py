"""The events of a response. Each has a number; those about an item say which one it is."""

from __future__ import annotations

from typing import Union

from msgspec import Struct

from legato.api.openai.responses import TokenLogprob
from legato.api.responses.items import OutputItem, OutputText, ReasoningText, ResponseObject, SummaryText


class ResponseEvent(Struct, kw_only=True):
    sequence_number: int


# ---- of the response -------------------------------------------------------------------------------------------------


class _OfResponse(ResponseEvent, kw_only=True):
    response: ResponseObject


class ResponseQueued(_OfResponse, tag="response.queued"):
    pass


class ResponseCreated(_OfResponse, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    pass


class ResponseFailed(_OfResponse, tag="response.failed"):
    pass


# ---- of an item ------------------------------------------------------------------------------------------------------


class _OfItem(ResponseEvent, kw_only=True):
    output_index: int


class OutputItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    item: OutputItem


class OutputItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    item: OutputItem


class _OfPart(_OfItem, kw_only=True):
    item_id: str
    content_index: int


class ContentPartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class _OfSummary(_OfItem, kw_only=True):
    item_id: str
    summary_index: int


class SummaryPartAdded(_OfSummary, kw_only=True, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryPartDone(_OfSummary, kw_only=True, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryTextDelta(_OfSummary, kw_only=True, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryTextDone(_OfSummary, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


class _OfCall(_OfItem, kw_only=True):
    item_id: str


class ArgumentsDelta(_OfCall, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfCall, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(_OfCall, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_OfCall, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


AnyResponseEvent = Union[  # noqa: UP007 - a list of this length is read more easily
    ResponseQueued, ResponseCreated, ResponseInProgress, ResponseCompleted, ResponseIncomplete, ResponseFailed,
    OutputItemAdded, OutputItemDone, ContentPartAdded, ContentPartDone,
    OutputTextDelta, OutputTextDone, ReasoningTextDelta, ReasoningTextDone,
    SummaryPartAdded, SummaryPartDone, SummaryTextDelta, SummaryTextDone,
    ArgumentsDelta, ArgumentsDone, CustomInputDelta, CustomInputDone,
]  # fmt: skip
