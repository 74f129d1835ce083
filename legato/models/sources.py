"""Where the bytes of a checkpoint come from, and how they get to a GPU. GGUF files have a module of their own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from legato.common.errors import ModelFileError
from legato.models.mapped import MappedFiles

# Two of them are on the way at once: enough that neither side waits, and little beside any model.
STAGED_BYTES = 64 << 20
# Below this one copy is sooner done than two.
DIRECT_BYTES = 1 << 20
# The names that safetensors files have for dtypes.
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorSource(Protocol):
    """Named tensors of one checkpoint, in Hugging Face's names and layouts."""

    def names(self) -> set[str]: ...

    def nbytes(self) -> int: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Of what `read` returns."""
        ...

    def file(self, name: str) -> Path:
        """The file that has the tensor."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """One slice for each leading dimension; () for all. Reads no more of the file than it must.

        May be a view of a mapped file; the caller copies.
        """
        ...

    def forget(self, name: str) -> None:
        """Give back the memory that reading took. What `read` returned may still be used, but slowly."""
        ...


class SafetensorsSource:
    """One file or several; each stays memory-mapped until the model is built."""

    def __init__(self, files: Iterable[Path]) -> None:
        files = list(files)
        self._where: dict[str, tuple[Path, Any]] = {}
        self._mapped = MappedFiles(files)
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

    def dtype(self, name: str) -> torch.dtype:
        stored = self._where[name][1].get_slice(name).get_dtype()
        if stored not in STORED_DTYPES:
            raise ModelFileError(f"{self.file(name)}: tensor '{name}' has type {stored}, which is not supported")
        return STORED_DTYPES[stored]

    def file(self, name: str) -> Path:
        return self._where[name][0]

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        file, handle = self._where[name]
        try:
            tensor: torch.Tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file}: tensor {name} cannot be read: {error}") from None
        return tensor

    def forget(self, name: str) -> None:
        self._mapped.release(self._where[name][1].get_tensor(name))  # a view, wherever that matters


class Staging:
    """Copies to a device through two pinned buffers: one is filled while the other one is sent.

    Straight from a mapped file the driver would fault in the pages one by one, in one thread, and the bus would wait.
    Into a buffer torch copies with all its threads, and the bus runs at its own speed beside them.
    """

    def __init__(self, device: torch.device, num_bytes: int = STAGED_BYTES) -> None:
        self.device = device
        self._num_bytes = num_bytes
        self._buffers: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []  # made for the first tensor
        self._turn = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device. It may be gone from the host as soon as this returns."""
        if self.device.type == "cpu" or tensor.nbytes < DIRECT_BYTES:
            return tensor.to(self.device)
        return self.staged(tensor)

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.contiguous().view(-1).view(torch.uint8)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        pieces = zip(
            source.split(self._num_bytes), target.view(-1).view(torch.uint8).split(self._num_bytes), strict=True
        )
        for there, here in pieces:
            buffer, sent = self._next_buffer()
            staged = buffer[: there.numel()].copy_(there)
            here.copy_(staged, non_blocking=True)
            if sent is not None:
                sent.record()
        return target

    def _next_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The one that was used longer ago, once it has been sent."""
        is_cuda = self.device.type == "cuda"
        if not self._buffers:
            for _ in range(2):
                buffer = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
                self._buffers.append((buffer, torch.cuda.Event() if is_cuda else None))
        self._turn = 1 - self._turn
        buffer, sent = self._buffers[self._turn]
        if sent is not None:
            sent.synchronize()
        return buffer, sent
