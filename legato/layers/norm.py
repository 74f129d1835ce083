from __future__ import annotations

import torch
import torch.nn.functional as F

from legato.kernels.norm import add_rms_norm, rms_norm


class RMSNorm:
    """On a GPU one kernel, which also adds the residual. On a CPU torch's own norm: fewer calls would save a
    millisecond a step, but their rounding shows in the logits."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's output to the residual stream: (normed sum, sum). Takes `x` for its own."""
        if residual is None:
            return self(x), x
        if x.is_cuda:
            return add_rms_norm(x, residual, self.weight, self.eps, inplace=True)
        total = x.add_(residual)
        return self(total), total
