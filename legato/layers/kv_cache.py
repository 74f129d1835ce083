"""The KV cache: two tensors of blocks per layer. The router allocates the blocks.

A block has the keys and values of its tokens, or, in models without attention, the state after the last of them that
was computed. Then the state after a full block is there as long as the block, so that the scheduler shares, evicts and
preempts such sequences like all others. What is after an earlier token of a block is gone: drafts cannot be taken back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from legato.kernels.kv_format import EIGHT_BITS, KVScales, as_stored, store
from legato.kernels.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class LayerCache:
    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]; of states [num_blocks, half, width]
    values: torch.Tensor
    scales: KVScales | None = field(default=None, kw_only=True)  # what is stored is divided by them

    def store(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write [T, num_kv_heads, head_dim] to the slots [T]."""
        k_scale, v_scale = self._each_scale
        store(self.keys.flatten(0, 1), slots, keys, k_scale)
        store(self.values.flatten(0, 1), slots, values, v_scale)

    def paged(self, block_tables: torch.Tensor, context_lens: torch.Tensor, rows: torch.Tensor) -> PagedKV:
        """What attention reads of it."""
        return PagedKV(self.keys, self.values, block_tables, context_lens, rows, self.scales)

    def as_read(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the format of the cache and divided by its scales, as a later step will read them."""
        if self.keys.dtype == keys.dtype:
            return keys, values
        dtype, (k_scale, v_scale) = self.keys.dtype, self._each_scale
        return as_stored(keys, dtype, k_scale).to(keys.dtype), as_stored(values, dtype, v_scale).to(values.dtype)

    @property
    def _each_scale(self) -> tuple[float | None, float | None]:
        return (None, None) if self.scales is None else (self.scales.keys, self.scales.values)


@dataclass(frozen=True, slots=True)
class StateCache(LayerCache):
    """States instead of keys and values: of the first half of the channels in `keys`, of the others in `values`."""

    block_size: int


@dataclass(frozen=True, slots=True)
class KVShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # The checkpoint's, for each of these layers; (): it has none.
    scales: tuple[KVScales | None, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        assert len(self.scales) in (0, self.num_layers), (self.scales, self.num_layers)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Of a block in each of the two tensors of a layer."""
        return block_size, self.num_kv_heads, self.head_dim

    def layer(self, number: int, keys: torch.Tensor, values: torch.Tensor, block_size: int) -> LayerCache:
        """The one place where it is decided whether scales are used: where the format has too few bits to do without
        them."""
        is_scaled = bool(self.scales) and self.dtype in EIGHT_BITS
        return LayerCache(keys, values, scales=self.scales[number] if is_scaled else None)

    def block_bytes(self, block_size: int) -> int:
        """Of a block in all layers."""
        return 2 * self.num_layers * math.prod(self.block_shape(block_size)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateShape(KVShape):
    """Of layers that keep a state of `width` numbers for each channel: of the first half of the channels in one tensor,
    of the others in the other. `num_kv_heads` and `head_dim` are what that comes to for a token."""

    half: int  # of the channels, rounded up
    width: int

    # Tokens: few enough to share prefixes, and so many that states take less memory than keys and values would.
    block_size: ClassVar[int] = 256

    @classmethod
    def of(cls, num_layers: int, num_channels: int, width: int) -> StateShape:
        half = -(-num_channels // 2)
        return cls(num_layers, 1, -(-half * width // cls.block_size), torch.float32, half, width)

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """The same for any number of tokens."""
        return self.half, self.width

    def layer(self, number: int, keys: torch.Tensor, values: torch.Tensor, block_size: int) -> LayerCache:
        return StateCache(keys, values, block_size)


class KVCache:
    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        size = (num_blocks, *shape.block_shape(block_size))
        # Not zeroed: on a CPU the pages are only taken from the system when a block is first written.
        tensors = [
            [torch.empty(size, dtype=shape.dtype, device=device) for _ in range(2)] for _ in range(shape.num_layers)
        ]
        self.layers = [shape.layer(i, keys, values, block_size) for i, (keys, values) in enumerate(tensors)]
