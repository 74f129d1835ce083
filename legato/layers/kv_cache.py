"""The KV cache: two tensors of blocks per layer. The router allocates the blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.kernels.kv_format import as_stored, store


@dataclass(frozen=True, slots=True)
class LayerCache:
    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: torch.Tensor

    def store(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write [T, num_kv_heads, head_dim] to the slots [T]."""
        store(self.keys.flatten(0, 1), slots, keys)
        store(self.values.flatten(0, 1), slots, values)

    def as_read(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values rounded to the format of the cache, as a later step will read them."""
        if self.keys.dtype == keys.dtype:
            return keys, values
        dtype = self.keys.dtype
        return as_stored(keys, dtype).to(keys.dtype), as_stored(values, dtype).to(values.dtype)


@dataclass(frozen=True, slots=True)
class KVShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        # Not zeroed: on a CPU the pages are only taken from the system when a block is first written.
        self.layers = [
            LayerCache(*(torch.empty(size, dtype=shape.dtype, device=device) for _ in range(2)))
            for _ in range(shape.num_layers)
        ]
