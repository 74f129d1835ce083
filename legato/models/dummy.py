"""Random weights of the right shapes, for measuring without a checkpoint (`--load-format dummy`)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from legato.layers.shard import Shard
from legato.models.weights import Weights
from legato.quantization.method import DENSE, Method
from legato.quantization.stored import Ranges


class NoTensors:
    """A source with nothing in it: dummy weights are made, not read."""

    def names(self) -> set[str]:
        return set()

    def nbytes(self) -> int:
        return 0

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def dtype(self, name: str) -> torch.dtype:
        raise KeyError(name)

    def file(self, name: str) -> Path:
        raise KeyError(name)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        raise KeyError(name)

    def forget(self, name: str) -> None:
        """Nothing was read."""


class DummyWeights(Weights):
    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
        method: Method = DENSE,
        packs: bool = False,
    ) -> None:
        super().__init__(NoTensors(), dtype, device, shard, method=method, packs=packs)

    def __contains__(self, name: str) -> bool:
        return True

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Mapping[int, Ranges] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Small enough that activations stay finite through any depth; norms are 1 like trained ones. A name gives the
        same values in every process, so that a restarted shard continues with the model that it had."""
        spans = cut or {}
        sizes = [sum(last - first for first, last in spans.get(dim, [(0, size)])) for dim, size in enumerate(shape)]
        made = torch.ones(sizes, dtype=dtype or self.dtype, device=self.device)
        if len(sizes) == 1 or made.is_meta:  # `legato plan` counts tensors that have no values
            return made
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return made.normal_(0.0, 0.02, generator=generator)
