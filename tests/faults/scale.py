"""How much of the fault table is tried: enough to notice a mistake, or (`make faults`) all that the table asks for."""

from __future__ import annotations

import os

FULL = "FAULTS" in os.environ


def cases(full: int, quick: int) -> int:
    assert 0 < quick <= full
    return full if FULL else quick
