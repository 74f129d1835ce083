"""Plain matrices: fp32, bf16, fp16. And what a layer needs of a weight matrix, whatever its format."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from legato.kernels.activation import Activation, gate_and_mul
from legato.kernels.gated_linear import gated_linear, suits
from legato.kernels.language import kernel_or_torch
from legato.kernels.small_linear import pays, small_linear
from legato.kernels.split_linear import pays_to_split, split_linear


class Weight(Protocol):
    """A matrix [out, in], maybe with a bias. Called once per layer and step, and allocates its result only."""

    out_features: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        ...

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        ...


class DenseWeight:
    """The framework's own matrix product, and on a GPU kernels for the few rows where reading the weight is all."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if pays(x):
            return small_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def apply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """For packed gate and up projections: `gate_and_mul` of what `apply` returns, in one kernel where that is
        faster."""
        if pays(x):
            return small_linear(x, self.weight, self.bias, activation=activation)
        if self.bias is None and suits(x, self.weight, activation):
            return kernel_or_torch(x, gated_linear, _gated_linear_torch)(x, self.weight, activation)
        return gate_and_mul(self.apply(x), activation)

    def apply_in_parts(self, x: torch.Tensor) -> torch.Tensor:
        """As `apply`, or the parts [p, T, out] in float32 that the caller has to add up, whichever is faster."""
        if self.bias is None and pays_to_split(x, self.weight):
            return split_linear(x, self.weight)
        return self.apply(x)


def _gated_linear_torch(x: torch.Tensor, weight: torch.Tensor, activation: Activation) -> torch.Tensor:
    return gate_and_mul(F.linear(x, weight), activation)


class PackedWeight:
    """A float32 matrix in oneDNN's blocked order, for CPUs.

    A decode step reads every weight once, so its layout decides the speed: measured on two Zen cores with SmolLM2's
    shapes, 24 ms a step instead of 44 at batch 1 and 33 instead of 66 at batch 16.
    """

    # The row count that the order is chosen for. Packed for 64 it is as good for 1 and for 512; packed for 1 it is not.
    ROWS_HINT = 64

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS_HINT)
        self.bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return product


def dense_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseWeight | PackedWeight:
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _has_onednn():
        return DenseWeight(weight, bias)
    return PackedWeight(weight, bias)


def _has_onednn() -> bool:
    available = bool(torch.backends.mkldnn.is_available())
    return available and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
