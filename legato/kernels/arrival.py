"""Reduction within one launch: the program that finishes last adds up the parts of the others, without a second launch.

Every program of a group stores its part and then arrives at the group's counter. The last to arrive reads all parts.
It also sets the counter back to zero, so the counters are zeroed once, when they are made, and never per launch.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from legato.kernels.language import Pointer, Scalar, jit, tl

NUM_COUNTERS = 1 << 16


@cache
def arrival_counters(device: torch.device) -> Tensor:
    """Shared by all kernels of a device, which is sound because a shard launches them on one stream.

    Made by the first launch, which must not happen while a CUDA graph is captured: the memory would be the graph's.
    """
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run the kernel once before capturing it"
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@jit
def arrives_last(counter: Pointer, group_size: Scalar) -> Scalar:
    """True in one program of the group: what all of them stored before this call is then visible to it.

    Read it past the first-level cache (cache_modifier=".cg").
    """
    # Every thread's stores come before the one thread that counts; its release then covers them all.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == group_size - 1
    if is_last:
        tl.store(counter, 0)
    return is_last
