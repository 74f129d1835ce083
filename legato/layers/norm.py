"""Norms. `norm(x)` normalises; `norm.add(x, residual)` first adds a layer's output to the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato.kernels.norm import add_layer_norm, add_rms_norm, is_in_parts, layer_norm, rms_norm
from legato.kernels.quantized.linear import FEW_ROWS
from legato.quantization.weight import row_type_of_weight


class RMSNorm:
    """On a GPU one kernel, which also adds the residual. On a CPU torch's own norm: fewer calls would save a
    millisecond a step, but their rounding shows in the logits.

    `offset` is added to the weight once, in fp32: Gemma's checkpoints have the weight minus one.
    """

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight = weight.float() + offset if offset else weight
        self.eps = eps
        self.reader: object = None  # the weight of the product behind it, which may want many rows in 8 bits

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size of the weight]: the hidden state, or single heads."""
        if x.is_cuda or x.dtype != self.weight.dtype:
            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's output to the residual stream: (normed sum, sum). May overwrite `x`.

        It may be in parts, [p, T, hidden] in float32, which are added first.
        """
        if residual is None:
            return self(x), x
        if x.is_cuda or is_in_parts(x, residual):
            row_type = row_type_of_weight(self.reader) if residual.shape[0] > FEW_ROWS else None
            return add_rms_norm(x, residual, self.weight, self.eps, inplace=True, row_type=row_type)
        total = x.add_(residual)
        return self(total), total


class LayerNorm:
    """On a GPU one kernel, like RMSNorm."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, size: int) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.shape = (size,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RMSNorm.add`."""
        if residual is None:
            return self(x), x
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)
