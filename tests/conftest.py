"""What must be decided before any test module is imported, and what tests of several folders need."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels run in Triton's interpreter, which Triton chooses when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts what it puts in the background with SIGINT ignored, and so would all programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis would fail an example that takes longer than 200 ms, as one may on a busy machine.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.fixture
def small_heap() -> Iterator[None]:
    """For those who look at the clock: a test run holds far more objects than a router, and looking through all of
    them for garbage takes a while."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
