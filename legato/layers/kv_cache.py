"""The KV cache: two tensors of blocks per layer. The router allocates the blocks.

A block has the keys and values of its tokens, or, in layers without attention, the state after the last of them that
was computed. Then the state after a full block is there as long as the block, so that the scheduler shares, evicts and
preempts such sequences like all others. What is after an earlier token of a block is gone: drafts cannot be taken back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from legato.common.errors import OptionError
from legato.kernels.kv_format import EIGHT_BITS, KVScales, as_stored, store
from legato.kernels.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class LayerCache:
    keys: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]; of states [num_blocks, ...]
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
    """States instead of keys and values, in two tensors as the architecture divides them."""

    block_size: int


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One of the two tensors of a layer: what a block has in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # The checkpoint's, for each of these layers; (): it has none.
    scales: tuple[KVScales | None, ...] = field(default=(), kw_only=True)

    # Tokens of a block where layers keep states: so many that states do not take most of the memory. None: there are no
    # states, and --block-size says it.
    block_size: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        assert len(self.scales) in (0, self.num_layers), (self.scales, self.num_layers)

    @property
    def keeps_states(self) -> bool:
        """Whether what a step changes in the cache depends on what was there: it can be neither repeated nor undone."""
        return self.block_size is not None

    @property
    def numbers_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def bytes_per_token(self) -> int:
        return self.numbers_per_token * self.dtype.itemsize

    def parts(self, number: int, block_size: int) -> tuple[BlockPart, BlockPart]:
        """Of a block in layer `number`."""
        part = BlockPart((block_size, self.num_kv_heads, self.head_dim), self.dtype)
        return part, part

    def layer(self, number: int, keys: torch.Tensor, values: torch.Tensor, block_size: int) -> LayerCache:
        """The one place where it is decided whether scales are used: where the format has too few bits to do without
        them."""
        is_scaled = bool(self.scales) and self.dtype in EIGHT_BITS
        return LayerCache(keys, values, scales=self.scales[number] if is_scaled else None)

    def allocate(self, number: int, num_blocks: int, block_size: int, device: torch.device) -> LayerCache:
        """Of layer `number`. Not zeroed: on a CPU the pages are only taken from the system when a block is first
        written."""
        keys, values = (
            torch.empty((num_blocks, *part.shape), dtype=part.dtype, device=device)
            for part in self.parts(number, block_size)
        )
        return self.layer(number, keys, values, block_size)

    def block_bytes(self, block_size: int) -> int:
        """Of a block in all layers."""
        return sum(part.num_bytes for i in range(self.num_layers) for part in self.parts(i, block_size))


@dataclass(frozen=True, slots=True)
class StateShape(KVShape):
    """Of layers that keep a state of `width` numbers for each channel: of the first half of the channels in one tensor,
    of the others in the other. `num_kv_heads` and `head_dim` are what that comes to for a token."""

    half: int  # of the channels, rounded up
    width: int

    block_size: ClassVar[int] = 256

    @classmethod
    def of(cls, num_layers: int, num_channels: int, width: int) -> StateShape:
        half = -(-num_channels // 2)
        return cls(num_layers, 1, -(-half * width // cls.block_size), torch.float32, half, width)

    def parts(self, number: int, block_size: int) -> tuple[BlockPart, BlockPart]:
        """The same for any number of tokens."""
        part = BlockPart((self.half, self.width), self.dtype)
        return part, part

    def layer(self, number: int, keys: torch.Tensor, values: torch.Tensor, block_size: int) -> LayerCache:
        return StateCache(keys, values, block_size)


@dataclass(frozen=True, slots=True)
class HybridShape(KVShape):
    """Of models in which some layers have attention and the others keep states, in float32."""

    state_shapes: tuple[tuple[int, ...], tuple[int, ...]]  # of a state's two tensors
    state_layers: tuple[bool, ...]  # which layers keep states

    # More than `StateShape`'s: a state is as large as the keys and values of thousands of tokens.
    block_size: ClassVar[int] = 1024

    @property
    def num_states(self) -> int:
        return sum(self.state_layers)

    @property
    def numbers_per_token(self) -> int:
        return 2 * (self.num_layers - self.num_states) * self.num_kv_heads * self.head_dim

    @property
    def state_bytes_per_token(self) -> int:
        """Of a block of the usual size, rounded up."""
        num_bytes = self.num_states * sum(part.num_bytes for part in self._states)
        return -(-num_bytes // self.block_size)

    @property
    def bytes_per_token(self) -> int:
        return self.numbers_per_token * self.dtype.itemsize + self.state_bytes_per_token

    def parts(self, number: int, block_size: int) -> tuple[BlockPart, BlockPart]:
        return self._states if self.state_layers[number] else KVShape.parts(self, number, block_size)

    def layer(self, number: int, keys: torch.Tensor, values: torch.Tensor, block_size: int) -> LayerCache:
        if self.state_layers[number]:
            return StateCache(keys, values, block_size)
        return KVShape.layer(self, number, keys, values, block_size)

    @property
    def _states(self) -> tuple[BlockPart, BlockPart]:
        first, second = self.state_shapes
        return BlockPart(first, torch.float32), BlockPart(second, torch.float32)


def check_dtype_option(chosen: str | None, shape: KVShape, model_type: str) -> None:
    """Raises if there is nothing that `--kv-cache-dtype` could apply to."""
    if chosen is not None and isinstance(shape, StateShape):
        raise OptionError(f"--kv-cache-dtype: the states of a {model_type} are float32; leave out the option")


class KVCache:
    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = [shape.allocate(number, num_blocks, block_size, device) for number in range(shape.num_layers)]

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """All that blocks are in: [num_blocks, ...] each."""
        for layer in self.layers:
            yield layer.keys
            yield layer.values

    @property
    def num_kv_heads(self) -> int:
        """Of the layers with attention; 1 if there are none."""
        return next((layer.keys.shape[2] for layer in self.layers if not isinstance(layer, StateCache)), 1)
