"""Whether and how a model fits: weights, KV cache and the room of a step, before anything is loaded.

Reads configurations and the headers of weight files, neither weights nor torch. Weights and cache are counted; what a
step takes is estimated here and measured by a shard's warm-up (`server/memory.py`).
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legato.common.errors import ModelFileError
from legato.common.model_files import GgufModel, ModelFiles
from legato.server.captures import all_sizes
from legato.server.reserve import GRAPH_BYTES, reserve

SHARDS = (1, 2, 4, 8)
BLOCK_SIZE = 16
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3fn": 1, "fp8_e5m2": 1}
# Floating-point formats of safetensors, which are loaded in the model's number format; others stay as they are.
FLOATS = {"F64", "F32", "F16", "BF16"}
# What a process takes of a GPU before it computes anything.
CONTEXT_BYTES = 512 * 2**20
# Copies of the logits in float32 that sampling with filters and penalties makes.
SAMPLING_COPIES = 6


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a config.json that decide about memory."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied: bool
    dtype: str | None

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        text = config.get("text_config")
        config = config | text if isinstance(text, dict) else config
        num_heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
        return cls(
            num_layers=_count(config, "num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=_count(config, "intermediate_size", 4 * hidden),
            num_heads=num_heads,
            num_kv_heads=_count(config, "num_key_value_heads", num_heads),
            head_dim=_count(config, "head_dim", max(1, hidden // num_heads)),
            vocab_size=_count(config, "vocab_size"),
            max_positions=_count(config, "max_position_embeddings", 2048),
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=str(config.get("torch_dtype") or config.get("dtype") or "") or None,
        )

    def bytes_per_token(self, dtype: str, num_shards: int = 1) -> int:
        """Of the KV cache of one shard. Heads that cannot be split are kept by several."""
        heads = -(-self.num_kv_heads // num_shards)
        return 2 * self.num_layers * heads * self.head_dim * SIZES[dtype]

    def num_parameters(self) -> int:
        """Of a Llama of this shape, for one that has no files."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = (1 if self.tied else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    def step_bytes(self, num_tokens: int, num_rows: int, dtype: str, num_shards: int) -> int:
        """The residual stream, one layer's projections, and the logits with what sampling makes of them."""
        heads = self.num_heads + 2 * self.num_kv_heads
        wide = (heads * self.head_dim + 3 * self.intermediate_size) // num_shards
        layer = num_tokens * (3 * self.hidden_size + wide) * SIZES[dtype]
        return layer + num_rows * self.vocab_size * (SIZES[dtype] + 4 * SAMPLING_COPIES)

    def graph_bytes(self, num_rows: int, dtype: str) -> int:
        sizes = all_sizes(num_rows)
        return sum(sizes) * self.vocab_size * SIZES[dtype] + len(sizes) * GRAPH_BYTES


@dataclass(frozen=True, slots=True)
class Stored:
    """What the weight files hold."""

    num_floats: int = 0  # numbers that are loaded in the model's number format
    packed_bytes: int = 0  # quantised tensors that stay as they are
    types: dict[str, int] = field(default_factory=dict)  # format -> bytes in the files

    @property
    def file_bytes(self) -> int:
        return sum(self.types.values())

    def loaded_bytes(self, dtype: str) -> int:
        return self.num_floats * SIZES[dtype] + self.packed_bytes


@dataclass(frozen=True, slots=True)
class Device:
    kind: str  # "cuda" or "cpu"
    name: str
    memory: int  # bytes that may be used

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

    @property
    def tokens(self) -> int:
        """That the KV cache holds, in whole blocks; 0 if it does not fit."""
        left = self.room - self.weights - self.step
        return max(0, left // self.bytes_per_token // BLOCK_SIZE * BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    shape: Shape
    stored: Stored
    dtype: str
    kv_dtype: str
    device: Device
    num_rows: int
    step_tokens: int

    @property
    def fits(self) -> list[Fit]:
        """For every number of shards that the heads can be split into."""
        return [self._fit(count) for count in SHARDS if self.shape.num_heads % count == 0]

    def _fit(self, count: int) -> Fit:
        step = self.shape.step_bytes(self.step_tokens, self.num_rows, self.dtype, count)
        if self.device.kind == "cuda":
            step += self.shape.graph_bytes(self.num_rows, self.dtype)
        return Fit(
            count,
            -(-self.stored.loaded_bytes(self.dtype) // count),
            step,
            self.shape.bytes_per_token(self.kv_dtype, count),
            self.device.room(count),
        )

    @property
    def best(self) -> Fit | None:
        """The fewest shards that hold the longest text, else the fewest that hold anything."""
        serving = [fit for fit in self.fits if fit.tokens]
        whole = [fit for fit in serving if fit.tokens >= self.shape.max_positions]
        return next(iter(whole or serving), None)

    def command(self, spelled: list[str]) -> str | None:
        """What to type. `spelled` are the words for the model and the formats that were chosen."""
        if self.best is None:
            return None
        words = list(spelled)
        if self.best.num_shards > 1:
            words += ["--num-shard", str(self.best.num_shards)]
        if self.best.tokens < self.shape.max_positions:
            words += ["--max-total-tokens", str(self.best.tokens)]
        return shlex.join(words)


def stored_in(files: ModelFiles) -> Stored:
    """By the headers of the weight files."""
    files.check_weights()
    if isinstance(files, GgufModel):
        tensors = files.gguf.tensors.values()
        types: Counter[str] = Counter()
        for tensor in tensors:
            types[tensor.type.name] += tensor.nbytes
        # Blocks are decoded when they are loaded.
        return Stored(sum(math.prod(tensor.shape) for tensor in tensors), 0, dict(types))
    return _stored_in_safetensors(files.weight_files())


def _stored_in_safetensors(paths: list[Path]) -> Stored:
    num_floats = packed = 0
    types: Counter[str] = Counter()
    for path in paths:
        for name, tensor in _header(path).items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            kind = str(tensor.get("dtype"))
            types[kind] += end - begin
            if kind in FLOATS:
                num_floats += math.prod(tensor["shape"])
            else:
                packed += end - begin
    return Stored(num_floats, packed, dict(types))


def _header(path: Path) -> dict[str, Any]:
    """`check_weights` has found it well-formed."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header


def choose_dtype(asked: str | None, shape: Shape, device: Device) -> str:
    """As a shard chooses it."""
    if asked is not None:
        return asked
    if device.kind == "cpu":
        return "float32"
    return shape.dtype if shape.dtype in ("float16", "bfloat16") else "float16"


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key) if config.get(key) is not None else default
    if not isinstance(value, int) or value < 1:
        raise ModelFileError(f"config.json: '{key}' is {value!r} and must be a positive whole number")
    return value
