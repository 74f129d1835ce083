"""From matrices, dense or quantized, to the weights that layers call.

`QuantizedWeight` is where kernels take the place of the definition in torch (`QuantizedMatrix.multiply`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato.kernels.quantized.linear import FEW_ROWS, KERNEL_TYPES, Gate, quantized_linear, row_type_of
from legato.kernels.quantized.operand import Operand
from legato.quantization.dense import Weight, dense_weight
from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.operands import describe, operand_on_gpu

Matrix = torch.Tensor | QuantizedMatrix  # [out, in]


class QuantizedWeight:
    """A quantized matrix and maybe a bias."""

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
        self.out_features = matrix.out_features
        self.matrix = matrix
        self.bias = bias
        self.operand = operand_on_gpu(matrix)
        # The same in fp8, for more than a few rows; see `fp8_copies.py`.
        self.fp8_copy: Operand | None = None
        # What products of many rows quantize their rows to; None: nothing. Layers before it may do so on the way.
        self.row_type = self._wanted_rows(self.operand)
        self.product_name = "torch" if self.operand is None else describe(self.operand)

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def keep_fp8_copy(self, copy: Operand) -> None:
        self.fp8_copy = copy
        self.row_type = self._wanted_rows(copy)

    def _wanted_rows(self, operand: Operand | None) -> torch.dtype | None:
        return None if operand is None or self.matrix.groups.order is not None else row_type_of(operand)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, None)

    def apply_gated(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        """For packed gate and up projections: `gate_and_mul` of what `apply` returns, in one kernel where it can be."""
        return self._multiply(x, gate)

    def _multiply(self, x: torch.Tensor, gate: Gate | None) -> torch.Tensor:
        if self.operand is None or x.dtype not in KERNEL_TYPES:
            product = self.matrix.multiply(x)
            if self.bias is not None:
                product += self.bias
            return product if gate is None else gate.apply(product)
        order = self.matrix.groups.order
        operand = self.operand if self.fp8_copy is None or x.shape[0] <= FEW_ROWS else self.fp8_copy
        return quantized_linear(x if order is None else x.index_select(1, order), operand, self.bias, gate)


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
        return StackedWeight([weight_of([part]) for part in _stacked_runs(matrices)], bias, order)
    if isinstance(one, QuantizedMatrix):
        return QuantizedWeight(one if order is None else one.take(order), bias)
    return dense_weight(one if order is None else one[order], bias)


def _stacked_runs(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Neighbours that can be one matrix are: GGUF files often have queries and keys of one type, and values of another.
    As few products as possible, in order."""
    runs = [matrices[0]]
    for matrix in matrices[1:]:
        both = stack([runs[-1], matrix])
        runs[-1:] = [runs[-1], matrix] if both is None else [both]
    return runs


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


def row_type_of_weight(weight: object) -> torch.dtype | None:
    """In which type of 8 bits a weight wants many rows; None: as they are. To be asked for each step: fp8 copies are
    made when all layers are there."""
    return weight.row_type if isinstance(weight, QuantizedWeight) else None


def quantized_in(weight: object) -> list[QuantizedWeight]:
    """The weight, or those of its parts that are quantized."""
    if isinstance(weight, QuantizedWeight):
        return [weight]
    return [found for part in getattr(weight, "weights", ()) for found in quantized_in(part)]


def kinds_of(weight: object) -> list[str]:
    """What the quantized matrices of a weight are and what multiplies them, for the log."""
    if isinstance(weight, QuantizedWeight):
        return [f"{weight.matrix.kind}: {weight.product_name}"]
    if getattr(weight, "operand", None) is not None:  # experts, all of which one kernel multiplies
        return [f"{part.matrix.kind}: experts in one kernel" for part in getattr(weight, "weights", ())]
    parts = [kind for part in getattr(weight, "weights", ()) for kind in kinds_of(part)]
    return parts + list(getattr(weight, "kinds", ()))
