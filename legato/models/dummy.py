"""Random weights of the right shapes, for measuring without a checkpoint (`--load-format dummy`)."""

from __future__ import annotations

import torch

from legato.models.weights import Weights


class NoTensors:
    """A source with nothing in it: dummy weights are made, not read."""

    def names(self) -> set[str]:
        return set()

    def nbytes(self) -> int:
        return 0

    def tensor(self, name: str) -> torch.Tensor:
        raise KeyError(name)


class DummyWeights(Weights):
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(NoTensors(), dtype, device)

    def __contains__(self, name: str) -> bool:
        return True

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Small enough that activations stay finite through any depth; norms are 1 like trained ones."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, 0.02)
