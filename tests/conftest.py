"""What must be decided before any test module is imported."""

from __future__ import annotations

import os

import torch

# Without a GPU the kernels run in Triton's interpreter, which Triton chooses when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
