"""What a layer needs of a weight matrix, whatever its format."""

from __future__ import annotations

from typing import Protocol

import torch


class Weight(Protocol):
    """A matrix [out, in], maybe with a bias. Called once per layer and step, and allocates its result only."""

    out_features: int

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        ...
