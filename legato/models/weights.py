"""Weights are pulled by name: a model's constructor asks for what it needs and so shows the checkpoint's layout.

`Weights` casts, fuses and keeps account: a tensor that is missing, left over or of the wrong shape is an error that
names it. Where the bytes come from is a `TensorSource`, one per file format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from legato.common.errors import ModelFileError
from legato.quantization.base import Weight
from legato.quantization.dense import dense_weight

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all

# What old checkpoints carry along and no model reads.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")


class TensorSource(Protocol):
    """Named tensors of one checkpoint, in Hugging Face's names and layouts."""

    def names(self) -> set[str]: ...

    def nbytes(self) -> int: ...

    def tensor(self, name: str) -> torch.Tensor:
        """May be a view of a mapped file; the caller copies."""
        ...


class SafetensorsSource:
    """One file or several; each stays memory-mapped until the model is built."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._where: dict[str, tuple[Path, object]] = {}
        self._size = 0
        for file in files:
            try:
                handle = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError, json.JSONDecodeError) as error:
                raise ModelFileError(f"{file} is not a readable safetensors file: {error}") from None
            self._size += file.stat().st_size
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                self._where[name] = (file, handle)

    def names(self) -> set[str]:
        return set(self._where)

    def nbytes(self) -> int:
        return self._size

    def tensor(self, name: str) -> torch.Tensor:
        file, handle = self._where[name]
        try:
            tensor: torch.Tensor = handle.get_tensor(name)  # type: ignore[attr-defined]
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file}: tensor {name} cannot be read: {error}") from None
        return tensor


class Weights:
    def __init__(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._source = source
        self._names = source.names()
        self._unused = set(self._names)
        self._progress = progress
        self._total = source.nbytes()
        self._read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._names:
            raise ModelFileError(f"the checkpoint has no tensor '{name}'")
        self._unused.discard(name)
        raw = self._source.tensor(name)
        if tuple(raw.shape) != shape:
            raise ModelFileError(f"tensor '{name}' has shape {tuple(raw.shape)}, the configuration says {shape}")
        if not raw.is_floating_point():
            raise ModelFileError(f"tensor '{name}' has type {raw.dtype}; only floating-point weights can be loaded")
        self._read += raw.nbytes
        if self._progress is not None:
            self._progress(self._read, self._total)
        return raw.to(device=self.device, dtype=self.dtype)

    def linear(self, parts: list[tuple[str, int]], in_features: int, bias: bool = False) -> Weight:
        """Matrices [out_i, in] stacked into one product, as q, k and v or gate and up are: one launch, not three."""
        matrices = [self.tensor(f"{name}.weight", (out, in_features)) for name, out in parts]
        biases = [self.tensor(f"{name}.bias", (out,)) for name, out in parts] if bias else []
        return dense_weight(_stack(matrices), _stack(biases) if biases else None)

    def skip(self, name: str) -> None:
        """`name` may be there and need not be read."""
        self._unused.discard(name)

    def check_all_used(self) -> None:
        left = sorted(name for name in self._unused if not name.endswith(IGNORED_SUFFIXES))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ModelFileError(f"the checkpoint has tensors that the model does not: {', '.join(left[:3])}{more}")


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
