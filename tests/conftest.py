"""What must be decided before any test module is imported."""

from __future__ import annotations

import os
import signal

import torch

# Without a GPU the kernels run in Triton's interpreter, which Triton chooses when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts what it puts in the background with SIGINT ignored, and so would all programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
