"""Commands set logging up for their whole process; here the process goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, legato = logging.getLogger(), logging.getLogger("legato")
    before = list(root.handlers), root.level, legato.level
    yield
    root.handlers[:], root.level, legato.level = before
