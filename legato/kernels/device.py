"""The properties of a GPU by which kernels choose tiles, stages and features.

Tests replace `DEFAULT` to compile for cards that are not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from legato.kernels.language import next_power_of_two


@dataclass(frozen=True, slots=True)
class GpuLimits:
    sm: int  # compute capability without the dot: 90 is 9.0
    shared_memory: int  # bytes that one program may use
    num_multiprocessors: int = 132

    @property
    def overlaps_launches(self) -> bool:
        """Programmatic dependent launch."""
        return self.sm >= 90

    @property
    def buffers_every_stage(self) -> bool:
        """Asynchronous matrix instructions read both operands from shared memory, so each stage has a buffer."""
        return self.sm in (90, 100)


# Of tensors that are not on a GPU: Triton's interpreter, and tests that compile without a device.
DEFAULT = GpuLimits(sm=90, shared_memory=232448)


def limits_of(tensor: Tensor) -> GpuLimits:
    return _limits(tensor.device) if tensor.is_cuda else DEFAULT


@cache
def _limits(device: torch.device) -> GpuLimits:
    """Cached: every launch of a step asks for it."""
    properties = torch.cuda.get_device_properties(device)
    sm = properties.major * 10 + properties.minor
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return GpuLimits(sm, shared_memory, properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """One step of an attention kernel: `rows` queries against `block_n` keys of `head_dim` numbers."""

    rows: int
    block_n: int
    head_dim: int
    itemsize: int
    num_stages: int

    def shared_memory(self, limits: GpuLimits) -> int:
        """Upper bound of what Triton allocates: queries, keys and values of every stage, scores between two products.

        `tests/kernels/test_cards.py` compares it with compiled kernels.
        """
        width = next_power_of_two(self.head_dim, 16)
        num_buffers = self.num_stages if limits.buffers_every_stage else max(self.num_stages - 1, 1)
        numbers = self.rows * (width + self.block_n) + 2 * num_buffers * self.block_n * width
        return numbers * self.itemsize + 1024

    def fits(self, limits: GpuLimits) -> bool:
        return self.shared_memory(limits) <= limits.shared_memory
