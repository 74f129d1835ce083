"""Whether and how a model fits: weights, KV cache and the memory of a step, before anything is loaded.

Weights and cache are counted (`counting.py`); what a step takes is estimated here and measured by a shard's warm-up
(`server/memory/budget.py`).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from legato.models.keys import Keys
from legato.scheduling.limits import most_sampled
from legato.server.graphs.captures import kept_rows
from legato.server.memory.capacity import LAYER_GRAPH_BYTES, reserve

SHARDS = (1, 2, 4, 8)
BLOCK_SIZE = 16
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3fn": 1, "fp8_e5m2": 1}
# Copies of the logits in float32 that sampling with filters and penalties makes.
SAMPLING_COPIES = 6
# What a process takes of a GPU before it computes anything.
CONTEXT_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide about the memory of a step."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of all experts that one token is sent to
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    # Whether Legato computes it. Others run through transformers: in one shard, and without CUDA graphs.
    is_native: bool
    block_size: int = BLOCK_SIZE  # tokens of a block of the KV cache

    @property
    def longest_in_blocks(self) -> int:
        """Tokens of the blocks that a sequence of full length takes."""
        return -(-self.max_positions // self.block_size) * self.block_size

    def step_bytes(self, num_tokens: int, num_rows: int, dtype: str, num_shards: int) -> int:
        """The residual stream, one layer's projections, and the logits, also of drafts, with the copies that sampling
        makes."""
        heads = self.num_heads + 2 * self.num_kv_heads
        projections = (heads * self.head_dim + 3 * self.intermediate_size) // num_shards
        layer = num_tokens * (3 * self.hidden_size + projections) * SIZES[dtype]
        return layer + most_sampled(num_rows) * self.vocab_size * (SIZES[dtype] + 4 * SAMPLING_COPIES)

    def graph_bytes(self, num_rows: int, dtype: str) -> int:
        if not self.is_native:
            return 0
        kept = kept_rows(num_rows, drafts=True)
        return sum(kept) * self.vocab_size * SIZES[dtype] + len(kept) * self.num_layers * LAYER_GRAPH_BYTES


@dataclass(frozen=True, slots=True)
class ShardSize:
    """What one of `num_shards` shards holds."""

    num_shards: int
    weights: int  # bytes
    kv_numbers: int  # of each token in the KV cache
    adapters: int = 0  # bytes for LoRA adapters
    kv_dtype: str | None = None  # the model's own, if it has one
    state_bytes: int = 0  # of each token in the KV cache, beside keys and values


@dataclass(frozen=True, slots=True)
class Device:
    kind: str  # "cuda" or "cpu"
    name: str
    memory: int  # bytes that can be used

    def room(self, num_shards: int) -> int:
        """Bytes of one shard for weights, steps and cache. Shards on a CPU share its memory."""
        if self.kind == "cpu":
            return self.memory // num_shards
        return self.memory - CONTEXT_BYTES - reserve(self.memory)


@dataclass(frozen=True, slots=True)
class Fit:
    """One line of the plan: the model on `num_shards` devices. Bytes are those of each."""

    num_shards: int
    weights: int
    step: int
    bytes_per_token: int
    room: int
    adapters: int = 0
    block_size: int = BLOCK_SIZE

    @property
    def tokens(self) -> int:
        """Capacity of the KV cache, in whole blocks; 0 if the model does not fit."""
        left = self.room - self.weights - self.adapters - self.step
        return max(0, left // self.bytes_per_token // self.block_size * self.block_size)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    model: str
    shape: ModelShape
    formats: dict[str, int]  # format -> bytes in the weight files
    sizes: list[ShardSize]  # one for each number of shards
    dtype: str
    kv_dtype: str | None  # what was asked for
    packs: bool  # matrices on a CPU, in 4 to 8 bits
    device: Device
    num_rows: int
    step_tokens: int

    @property
    def fits(self) -> list[Fit]:
        return [self._fit(size) for size in self.sizes]

    def _fit(self, size: ShardSize) -> Fit:
        count = size.num_shards
        step = self.shape.step_bytes(self.step_tokens, self.num_rows, self.dtype, count)
        if self.device.kind == "cuda":
            step += self.shape.graph_bytes(self.num_rows, self.dtype)
        token_bytes = size.kv_numbers * SIZES[self._kv_dtype(size)] + size.state_bytes
        room, block_size = self.device.room(count), self.shape.block_size
        return Fit(count, size.weights, step, token_bytes, room, size.adapters, block_size)

    def _kv_dtype(self, size: ShardSize) -> str:
        return self.kv_dtype or size.kv_dtype or self.dtype

    @property
    def kv_dtypes(self) -> str:
        """In words, for one shard and for several."""
        return ", ".join(dict.fromkeys(map(self._kv_dtype, self.sizes)))

    @property
    def best(self) -> Fit | None:
        """The fewest shards that hold a sequence of full length, else the fewest that hold anything."""
        serving = [fit for fit in self.fits if fit.tokens]
        whole = [fit for fit in serving if fit.tokens >= self.shape.max_positions]
        return next(iter(whole or serving), None)

    def command(self, spelled: list[str]) -> str | None:
        """The command that serves it. `spelled` are the words for the model and the formats that were chosen."""
        if self.best is None:
            return None
        words = list(spelled)
        if self.best.num_shards > 1:
            words += ["--num-shard", str(self.best.num_shards)]
        if self.best.tokens < self.shape.max_positions:
            words += ["--max-total-tokens", str(self.best.tokens)]
        return shlex.join(words)


def choose_dtype(asked: str | None, config: dict[str, Any], device: Device) -> str:
    """As a shard chooses it."""
    if asked is not None:
        return asked
    if device.kind == "cpu":
        return "float32"
    keys = Keys({**config, **Keys(config).below("text_config").raw})
    stored = keys.get("torch_dtype", "dtype")
    return stored if stored in ("float16", "bfloat16") else "float16"
