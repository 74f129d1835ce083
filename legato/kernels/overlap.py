"""Overlapping launches: a kernel may start while the one before it still runs, up to where it needs its results.

This is CUDA's programmatic dependent launch (Hopper and later). It hides the gap between two kernels, which at batch
size 1 is a tenth of a decode step. Every kernel of this package calls `wait_for_previous` before it touches anything
that an earlier kernel may write or read.
"""

from __future__ import annotations

from torch import Tensor

from legato.kernels.device import limits_of
from legato.kernels.language import constexpr, jit, tl

OVERLAP_LAUNCHES = True


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Options and constant that every kernel is launched with."""
    return _OPTIONS[OVERLAP_LAUNCHES and tensor.is_cuda and limits_of(tensor).overlaps_launches]


_OPTIONS: dict[bool, dict[str, bool]] = {True: {"OVERLAP": True, "launch_pdl": True}, False: {"OVERLAP": False}}


@jit
def wait_for_previous(OVERLAP: constexpr) -> None:
    """Let the next kernel start, then wait for the end of the one before. What comes first must depend on neither."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
