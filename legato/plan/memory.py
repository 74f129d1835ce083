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

from legato.modelfiles.files import GgufModel, ModelFiles
from legato.plan.shape import SIZES, Shape
from legato.server.capacity import reserve

SHARDS = (1, 2, 4, 8)
BLOCK_SIZE = 16
# Floating-point formats of safetensors, which are loaded in the model's number format; others stay as they are.
FLOATS = {"F64", "F32", "F16", "BF16"}
# What a process takes of a GPU before it computes anything.
CONTEXT_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Stored:
    """What a model loads of its weight files."""

    num_floats: int = 0  # numbers that are loaded in the model's number format
    packed_bytes: int = 0  # quantised tensors that stay as they are
    types: dict[str, int] = field(default_factory=dict)  # format -> bytes in the files
    num_whole: int = 0  # of the floats, those that every shard has

    @property
    def file_bytes(self) -> int:
        return sum(self.types.values())

    def loaded_bytes(self, dtype: str) -> int:
        return self.num_floats * SIZES[dtype] + self.packed_bytes

    def bytes_of_each(self, dtype: str, num_shards: int) -> int:
        whole = self.num_whole * SIZES[dtype]
        return whole + -(-(self.loaded_bytes(dtype) - whole) // num_shards)


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
        """For every number of shards that leaves none without a head. transformers' own models know but one."""
        most = self.shape.num_heads if self.shape.is_native else 1
        return [self._fit(count) for count in SHARDS if count <= most]

    def _fit(self, count: int) -> Fit:
        step = self.shape.step_bytes(self.step_tokens, self.num_rows, self.dtype, count)
        if self.device.kind == "cuda":
            step += self.shape.graph_bytes(self.num_rows, self.dtype)
        return Fit(
            count,
            self.stored.bytes_of_each(self.dtype, count),
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


def stored_in(files: ModelFiles, shape: Shape) -> Stored:
    """By the headers of the weight files, whatever the architecture: experts, biases and all."""
    files.check_weights()
    if isinstance(files, GgufModel):
        tensors = [tensor for name, tensor in files.gguf.tensors.items() if shape.reads(name)]
        types: Counter[str] = Counter()
        for tensor in tensors:
            types[tensor.type.name] += tensor.nbytes
        # Blocks are decoded when they are loaded.
        return Stored(sum(math.prod(tensor.shape) for tensor in tensors), 0, dict(types))
    return _stored_in_safetensors(files.weight_files(), shape)


def _stored_in_safetensors(paths: list[Path], shape: Shape) -> Stored:
    num_floats = num_whole = packed = 0
    types: Counter[str] = Counter()
    for path in paths:
        for name, tensor in _header(path).items():
            if name == "__metadata__" or not shape.reads(name):
                continue
            begin, end = tensor["data_offsets"]
            kind = str(tensor.get("dtype"))
            types[kind] += end - begin
            if kind in FLOATS:
                num_floats += math.prod(tensor["shape"])
                num_whole += math.prod(tensor["shape"]) if shape.is_whole(name) else 0
            else:
                packed += end - begin
    return Stored(num_floats, packed, dict(types), num_whole)


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
