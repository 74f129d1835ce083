"""Chats: chat templates, tool calls and reasoning."""

from __future__ import annotations

from enum import IntEnum


class RenderedKind(IntEnum):
    """What a template process answers with."""

    FACTS = 1
    PROMPT = 2
    MISSING_VARIABLE = 3
    ERROR = 4
