"""Chats: templates that make a prompt of messages, and tools."""

from __future__ import annotations

from enum import IntEnum


class RenderedKind(IntEnum):
    """What a template process answers with."""

    FACTS = 1
    PROMPT = 2
    MISSING_VARIABLE = 3
    ERROR = 4
