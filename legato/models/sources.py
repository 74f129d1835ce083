"""Where the bytes of a checkpoint come from. One class per file format; GGUF has a file of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from legato.common.errors import ModelFileError


class TensorSource(Protocol):
    """Named tensors of one checkpoint, in Hugging Face's names and layouts."""

    def names(self) -> set[str]: ...

    def nbytes(self) -> int: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """One slice for each leading dimension; () for all. Reads no more of the file than it must.

        May be a view of a mapped file; the caller copies.
        """
        ...


class SafetensorsSource:
    """One file or several; each stays memory-mapped until the model is built."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._where: dict[str, tuple[Path, Any]] = {}
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

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name][1].get_slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        file, handle = self._where[name]
        try:
            tensor: torch.Tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file}: tensor {name} cannot be read: {error}") from None
        return tensor
