"""Releases the pages of memory-mapped files.

What was read through a mapping counts as memory of the process for as long as it is mapped: after loading, a whole
checkpoint. The pages stay in the page cache, where the next process finds them; only the way to them is taken away,
and reading there once more brings them back.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")


class MappedFiles:
    """Where this process has mapped some files. Only Linux tells; elsewhere nothing is found and nothing given back."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {str(file.resolve()) for file in files}

    def release(self, tensor: torch.Tensor) -> None:
        """The pages that the tensor alone lies in, if it is a view of one of the files: never memory of another kind,
        whose content would be lost."""
        first = tensor.data_ptr()
        last = first + tensor.nbytes
        if any(begin <= first and last <= end for begin, end in self._ranges):
            first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """[begin, end) of every mapping of one of the files. They stay as long as the files are open."""
        try:
            lines = MAPS.read_text().splitlines()
        except OSError:
            return []
        found = (re.match(r"(\w+)-(\w+) (?:\S+ +){4}(/.*)", line) for line in lines)
        return [(int(m[1], 16), int(m[2], 16)) for m in found if m is not None and m[3] in self._files]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
