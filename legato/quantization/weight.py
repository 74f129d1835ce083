"""From matrices, dense or quantized, to the weights that layers call, and which product computes each of them.

`product_of` is where a kernel takes the place of the definition in torch: it sees a matrix and the device it is on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from legato.quantization.dense import Weight, dense_weight
from legato.quantization.matrix import QuantizedMatrix

Matrix = torch.Tensor | QuantizedMatrix  # [out, in]
Product = Callable[[torch.Tensor], torch.Tensor]  # x [T, in] -> [T, out]


def product_of(matrix: QuantizedMatrix) -> tuple[str, Product]:
    """The fastest product of this matrix on its device, and its name for the log."""
    return "torch", matrix.multiply


class QuantizedWeight:
    """A quantized matrix and maybe a bias."""

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
        self.out_features = matrix.out_features
        self.matrix = matrix
        self.bias = bias
        self.product_name, self._product = product_of(matrix)

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x)
        return product if self.bias is None else product.add_(self.bias)


class StackedWeight:
    """Matrices that cannot be one, because their schemes or the order of their columns differ: one product each."""

    def __init__(self, weights: Sequence[Weight], bias: torch.Tensor | None, order: torch.Tensor | None) -> None:
        self.out_features = sum(weight.out_features for weight in weights)
        self.weights = weights
        self.bias = bias
        self.order = order

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights) + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.cat([weight.apply(x) for weight in self.weights], dim=1)
        if self.order is not None:
            product = product.index_select(1, self.order)
        return product if self.bias is None else product.add_(self.bias)


def weight_of(
    matrices: Sequence[Matrix], bias: torch.Tensor | None = None, order: torch.Tensor | None = None
) -> Weight:
    """One weight of matrices above each other. `order` is that of the outputs, where it should be another."""
    if order is not None:
        order = order.to(matrices[0].device)
        bias = None if bias is None else bias[order]
    one = stack(matrices)
    if one is None:
        return StackedWeight([weight_of([matrix]) for matrix in matrices], bias, order)
    if isinstance(one, QuantizedMatrix):
        return QuantizedWeight(one if order is None else one.take(order), bias)
    return dense_weight(one if order is None else one[order], bias)


def stack(matrices: Sequence[Matrix]) -> Matrix | None:
    """Matrices above each other as one; None if they cannot be one."""
    first, others = matrices[0], matrices[1:]
    if not others:
        return first
    dense = [matrix for matrix in matrices if isinstance(matrix, torch.Tensor)]
    if len(dense) == len(matrices):
        return torch.cat(dense)
    quantized = [matrix for matrix in others if isinstance(matrix, QuantizedMatrix)]
    if dense or not isinstance(first, QuantizedMatrix) or not all(map(first.can_stack, quantized)):
        return None
    return first.stacked(quantized)


def kinds_of(weight: object) -> list[str]:
    """What the quantized matrices of a weight are and what multiplies them, for the log."""
    if isinstance(weight, QuantizedWeight):
        return [f"{weight.matrix.kind}: {weight.product_name}"]
    parts = [kind for part in getattr(weight, "weights", ()) for kind in kinds_of(part)]
    return parts + list(getattr(weight, "kinds", ()))
