"""Overlapping launches: a kernel may start while the one before it still runs, up to where it needs its results.

This is CUDA's programmatic dependent launch (Hopper and later). It hides the gap between two kernels, which at batch
size 1 is a tenth of a decode step. Every kernel of this package calls `wait_for_previous` before it touches anything
that an earlier kernel may write or read.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from legato.kernels.language import constexpr, jit, tl

OVERLAP_LAUNCHES = True


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Options and constant that every kernel is launched with."""
    return _OPTIONS[OVERLAP_LAUNCHES and tensor.is_cuda and _can_overlap(tensor.device)]


_OPTIONS: dict[bool, dict[str, bool]] = {True: {"OVERLAP": True, "launch_pdl": True}, False: {"OVERLAP": False}}


@cache
def _can_overlap(device: torch.device) -> bool:
    """Asked once: every launch of a step would pay for it."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@jit
def wait_for_previous(OVERLAP: constexpr) -> None:
    """Let the next kernel start, then wait for the end of the one before. What comes first must depend on neither."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
