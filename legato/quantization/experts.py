"""The matrices of a layer's experts: one tensor, or quantized."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from legato.kernels.grouped_linear import Groups, _group_rows_torch, grouped_linear
from legato.kernels.language import kernel_or_torch
from legato.kernels.quantized.grouped import grouped_quantized_linear
from legato.kernels.quantized.linear import KERNEL_TYPES
from legato.kernels.quantized.operand import Operand
from legato.quantization.dense import Weight
from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.operands import operand_on_gpu
from legato.quantization.weight import Matrix, QuantizedWeight, stack, weight_of


class ExpertAddition(Protocol):
    """What adapters add to a product of experts."""

    def add_experts(
        self, product: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """product [T k, out], of x with the matrices of the experts `ids` [T, k]; the sum may overwrite it."""
        ...


class ExpertWeights(Protocol):
    """One matrix [out, in] for each expert. Called twice per layer and step."""

    num_experts: int
    lora: ExpertAddition | None  # set if adapters can change it

    @property
    def nbytes(self) -> int: ...

    def apply(self, x: torch.Tensor, groups: Groups, scale: torch.Tensor | None = None) -> torch.Tensor:
        """As `grouped_linear`: row r of the result is the product of its row of x with the matrix of its expert."""
        ...


class DenseExperts:
    lora: ExpertAddition | None = None

    def __init__(self, weight: torch.Tensor) -> None:
        self.num_experts = weight.shape[0]
        self.weight = weight  # [num_experts, out, in]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x: torch.Tensor, groups: Groups, scale: torch.Tensor | None = None) -> torch.Tensor:
        return grouped_linear(x, self.weight, groups, scale)


class QuantizedExperts:
    """`matrix` has all experts above each other, [num_experts out, in]; None where they cannot be one."""

    lora: ExpertAddition | None = None

    def __init__(self, matrix: QuantizedMatrix | None, weights: Sequence[Weight]) -> None:
        self.num_experts = len(weights)
        self.matrix = matrix
        self.weights = weights
        # Columns in another order would have to be put into it for every expert.
        is_in_order = matrix is not None and matrix.groups.order is None
        self.operand = operand_on_gpu(matrix) if matrix is not None and is_in_order else None

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def apply(self, x: torch.Tensor, groups: Groups, scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.operand is None or x.dtype not in KERNEL_TYPES:
            return self._one_by_one(x, groups, scale)

        def by_torch(x: torch.Tensor, _: Operand, groups: Groups, scale: torch.Tensor | None) -> torch.Tensor:
            return self._one_by_one(x, groups, scale)

        return kernel_or_torch(x, _grouped, by_torch)(x, self.operand, groups, scale)

    def _one_by_one(self, x: torch.Tensor, groups: Groups, scale: torch.Tensor | None) -> torch.Tensor:
        num_rows = groups.ids.numel()
        share = num_rows // max(x.shape[0], 1)
        # Again, by torch, which looks the rows up here: while kernels are compiled ahead, none has written `groups`.
        groups = _group_rows_torch(groups.ids, self.num_experts)
        out = torch.empty(num_rows, self.weights[0].out_features, dtype=x.dtype, device=x.device)
        for weight, (first, last) in zip(self.weights, pairwise(groups.starts.tolist()), strict=True):
            if first < last:
                rows = groups.order[first:last]
                out[rows] = weight.apply(x[rows // share])
        return out if scale is None else (out * scale.view(-1, 1)).to(x.dtype)


def _grouped(x: torch.Tensor, operand: Operand, groups: Groups, scale: torch.Tensor | None) -> torch.Tensor:
    return grouped_quantized_linear(x, operand, groups, scale)


def expert_weights(experts: Sequence[Sequence[Matrix]]) -> ExpertWeights:
    """From the matrices of each expert, which stand above each other."""
    one = stack([matrix for matrices in experts for matrix in matrices])
    if isinstance(one, torch.Tensor):
        return DenseExperts(one.unflatten(0, (len(experts), -1)))
    if one is None:
        return QuantizedExperts(None, [weight_of(matrices) for matrices in experts])
    each = one.out_features // len(experts)
    views = [one.rows(i * each, (i + 1) * each) for i in range(len(experts))]
    return QuantizedExperts(one, [QuantizedWeight(view, None) for view in views])
