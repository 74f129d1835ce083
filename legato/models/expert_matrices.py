"""The matrices of experts, which checkpoints have one by one, all in one tensor, or below each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from legato.models.checkpoint import Checkpoint
from legato.models.rows import merged_ranges
from legato.models.targets import expert_targets
from legato.quantization.experts import DenseExperts, ExpertWeights, expert_weights
from legato.quantization.stored import MatrixSlice
from legato.quantization.weight import Matrix, kinds_of


class ExpertMatrices(Checkpoint, ABC):
    """The part of `Weights` that reads experts: each shard has a span of their inner dimension."""

    def experts(
        self, name: str, num_experts: int, inner: int, hidden: int, parts: tuple[str, str, str]
    ) -> tuple[ExpertWeights, ExpertWeights]:
        """gate and up [2 inner, hidden] and down [hidden, inner] of each expert, with our span of `inner`.

        Checkpoints have three matrices for each expert, `parts` by name (gate, up, down), or all experts in two.
        """
        made = self._experts(name, num_experts, inner, hidden, parts)
        self.targets += expert_targets(name, parts, made, self.shard.span(inner), inner, hidden)
        return made

    def _experts(
        self, name: str, num_experts: int, inner: int, hidden: int, parts: tuple[str, str, str]
    ) -> tuple[ExpertWeights, ExpertWeights]:
        first, last = span = self.shard.span(inner)
        quantizer = self._method.quantizer
        if f"{name}.gate_up_proj" in self:
            halves = [span, (inner + first, inner + last)]
            gate_up = self.tensor(f"{name}.gate_up_proj", (num_experts, 2 * inner, hidden), {1: halves})
            is_whole = self._needs_whole_groups(span)
            down = self.tensor(f"{name}.down_proj", (num_experts, hidden, inner), {} if is_whole else {2: [span]})
            return self.fused_experts(gate_up), self.fused_experts(down, span if is_whole else None)
        if quantizer is not None or self._is_quantized(f"{name}.0.{parts[0]}"):
            return self._quantized_experts(name, num_experts, inner, hidden, parts)
        # Expert by expert into place: a layer of them is too large to be there twice.
        gate_up, down = (
            torch.empty(num_experts, *size, dtype=self.dtype, device=self.device)
            for size in ((2, last - first, hidden), (hidden, last - first))
        )
        for expert in range(num_experts):
            gate, up, out = (f"{name}.{expert}.{part}.weight" for part in parts)
            gate_up[expert, 0] = self.tensor(gate, (inner, hidden), {0: [span]})
            gate_up[expert, 1] = self.tensor(up, (inner, hidden), {0: [span]})
            down[expert] = self.tensor(out, (hidden, inner), {1: [span]})
        return DenseExperts(gate_up.flatten(1, 2)), DenseExperts(down)

    def stacked_experts(
        self, names: Sequence[str], num_experts: int, inner: int, hidden: int
    ) -> tuple[ExpertWeights, ExpertWeights]:
        """The same from three matrices [num_experts inner, hidden]: gate, up and down, of which the last one is
        transposed."""
        span = self.shard.span(inner)
        is_whole = self._needs_whole_groups(span)

        def read(name: str, first: int, last: int) -> torch.Tensor:
            rows = [(expert * inner + first, expert * inner + last) for expert in range(num_experts)]
            return self.tensor(name, (num_experts * inner, hidden), {0: merged_ranges(rows)}).unflatten(
                0, (num_experts, -1)
            )

        gate_up = torch.cat([read(name, *span) for name in names[:2]], dim=1)
        down = read(names[2], *((0, inner) if is_whole else span)).transpose(1, 2)
        return self.fused_experts(gate_up), self.fused_experts(down, span if is_whole else None)

    def _needs_whole_groups(self, columns: tuple[int, int]) -> bool:
        """Whether matrices are quantized in groups that a shard's columns would cut."""
        quantizer = self._method.quantizer
        return quantizer is not None and not between_groups(columns, quantizer.group_size)

    def fused_experts(self, matrices: torch.Tensor, columns: tuple[int, int] | None = None) -> ExpertWeights:
        """[num_experts, out, in]. `columns` are those that are wanted, if there are others."""
        quantizer = self._method.quantizer
        if quantizer is None:
            return DenseExperts(matrices.contiguous())
        quantized = [quantizer(matrix) for matrix in matrices]
        if columns is not None:
            quantized = [matrix.columns(*columns) for matrix in quantized]
        if self.dequantizes:
            self.kinds[f"{quantized[0].kind}: dequantized on load"] += len(quantized)
            return DenseExperts(torch.stack([matrix.dense(self.dtype) for matrix in quantized]))
        made = expert_weights([[matrix] for matrix in quantized])
        self.kinds.update(kinds_of(made))
        return made

    def _quantized_experts(
        self, name: str, num_experts: int, inner: int, hidden: int, parts: tuple[str, str, str]
    ) -> tuple[ExpertWeights, ExpertWeights]:
        span = self.shard.span(inner)
        gate_up, down = [], []
        for expert in range(num_experts):
            gate, up, out = (f"{name}.{expert}.{part}" for part in parts)
            gate_up.append([self._matrix(MatrixSlice(part, inner, hidden, [span])) for part in (gate, up)])
            down.append([self._matrix(MatrixSlice(out, hidden, inner, None, span))])
        made = expert_weights(gate_up), expert_weights(down)
        self.kinds.update(kind for experts in made for kind in kinds_of(experts))
        return made

    def _is_quantized(self, name: str) -> bool:
        return self._method.reader is not None and self._method.reader.has(name, self)

    @abstractmethod
    def _matrix(self, wanted: MatrixSlice) -> Matrix:
        """One matrix of the checkpoint, in its format: `Weights` knows them."""


def between_groups(columns: tuple[int, int], size: int) -> bool:
    """Whether a range of columns begins and ends with a group."""
    return size > 0 and columns[0] % size == 0 and columns[1] % size == 0
