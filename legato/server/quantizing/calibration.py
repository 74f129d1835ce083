"""A model that is run layer by layer over calibration text, and quantized on the way.

`CalibratedWeights` builds the model without its matrices. A layer's matrices are read when the layer is first run, see
their inputs, are quantized, and are given up before the next layer: memory is that of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from legato.layers.kv_cache import LayerCache
from legato.layers.step import Step
from legato.models.decoder import Decoder
from legato.models.sources import TensorSource
from legato.models.targets import MatrixPart
from legato.models.weights import Weights
from legato.quantization.dense import Weight
from legato.quantization.experts import ExpertWeights, QuantizedExperts
from legato.quantization.gptq import GptqMatrix, GptqOptions, Hessian, quantize
from legato.server.prepare import prepare
from legato.server.rows import Rows

BLOCK_SIZE = 16
# Tokens that go through a layer at once.
BATCH_TOKENS = 2048

Dense = tuple[str, torch.Tensor]  # name without `.weight`, [out, in]


class CalibratedWeight:
    """Matrices above each other that read the same inputs. `read` gets them from the checkpoint, in its order of rows;
    `rows` are those of the product."""

    def __init__(
        self,
        read: Callable[[], list[Dense]],
        out_features: int,
        bias: torch.Tensor | None,
        rows: Sequence[torch.Tensor],
        order: torch.Tensor | None,
    ) -> None:
        self.out_features = out_features
        self.nbytes = 0
        self._read = read
        self._bias = bias
        self._rows = rows  # of each matrix
        self._order = order  # of all rows
        self._matrices: list[Dense] = []
        self._product: torch.Tensor | None = None
        self._hessian: Hessian | None = None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        self.load()
        assert self._product is not None
        if self._hessian is not None:
            self._hessian.add(x)
        return F.linear(x, self._product, self._bias)

    def load(self) -> None:
        if self._product is None:
            self._matrices = self._read()
            first = self._matrices[0][1]
            self._hessian = Hessian(first.shape[1], first.device)
            self._product = self._stacked([matrix for _, matrix in self._matrices])

    def quantize(self, options: GptqOptions) -> Iterator[tuple[str, GptqMatrix]]:
        """From now on the product is that of the quantized matrices."""
        self.load()
        assert self._hessian is not None
        hessian, made = self._hessian.value, []
        self._hessian = None
        for name, matrix in self._matrices:
            quantized = quantize(matrix, hessian, options)
            made.append(quantized.dense().to(matrix.dtype))
            yield name, quantized
        self._matrices = []
        self._product = self._stacked(made)

    def release(self) -> None:
        self._product = None

    def _stacked(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        product = torch.cat([matrix[rows] for matrix, rows in zip(matrices, self._rows, strict=True)])
        return product if self._order is None else product[self._order]


class CalibratedWeights(Weights):
    """What `Weights.linear` makes, and the head, stay dense. `shapes` are those of the matrices that do not."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(source, dtype, device)
        self.shapes: dict[str, tuple[int, int]] = {}  # name without `.weight` -> [out, in]

    def _weight(
        self,
        parts: Sequence[MatrixPart],
        in_features: int,
        columns: tuple[int, int] | None,
        bias: bool,
        transposed: bool,
        order: torch.Tensor | None = None,
        *,
        quantize: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Weight:
        if not quantize:
            return super()._weight(parts, in_features, columns, bias, transposed, order, quantize=False, dtype=dtype)
        return self._calibrated(parts, in_features, bias, transposed, order)

    def experts(
        self, name: str, num_experts: int, inner: int, hidden: int, parts: tuple[str, str, str]
    ) -> tuple[ExpertWeights, ExpertWeights]:
        if f"{name}.gate_up_proj" in self:  # all experts in one tensor: GPTQ's layout has no such thing
            return super().experts(name, num_experts, inner, hidden, parts)
        gate_up, down = [], []
        for expert in range(num_experts):
            gate, up, out = (f"{name}.{expert}.{part}" for part in parts)
            gate_up.append(self._calibrated([MatrixPart(gate, inner), MatrixPart(up, inner)], hidden))
            down.append(self._calibrated([MatrixPart(out, hidden)], inner))
        return QuantizedExperts(None, gate_up), QuantizedExperts(None, down)

    def _calibrated(
        self,
        parts: Sequence[MatrixPart],
        in_features: int,
        bias: bool = False,
        transposed: bool = False,
        order: torch.Tensor | None = None,
    ) -> CalibratedWeight:
        def read() -> list[Dense]:
            return [(part.name, self._whole(part, in_features, transposed)) for part in parts]

        rows = [self._rows_of(part) for part in parts]
        for part in parts:
            self._unused.discard(f"{part.name}.weight")
            self.shapes[part.name] = (part.out_features, in_features)
        biases = [self.tensor(f"{part.name}.bias", (part.out_features,)) for part in parts if bias]
        added = torch.cat([each[places] for each, places in zip(biases, rows, strict=True)]) if bias else None
        if added is not None and order is not None:
            added = added[order]
        return CalibratedWeight(read, sum(map(len, rows)), added, rows, order)

    def _whole(self, part: MatrixPart, in_features: int, transposed: bool) -> torch.Tensor:
        shape = (part.out_features, in_features)
        matrix = self.tensor(f"{part.name}.weight", shape[::-1] if transposed else shape)
        return matrix.t().contiguous() if transposed else matrix

    def _rows_of(self, part: MatrixPart) -> torch.Tensor:
        ranges = part.rows or [(0, part.out_features)]
        return torch.cat([torch.arange(first, last, device=self.device) for first, last in ranges])


def calibrated_in(layer: object) -> list[CalibratedWeight]:
    """The weights of a layer, in the order of its attributes."""
    found: dict[int, CalibratedWeight] = {}

    def look(value: Any) -> None:
        if isinstance(value, CalibratedWeight):
            found[id(value)] = value
        elif isinstance(value, list | tuple):
            for each in value:
                look(each)
        elif type(value).__module__.startswith("legato.") and hasattr(value, "__dict__"):
            for each in vars(value).values():
                look(each)

    look(layer)
    return list(found.values())


class Calibration:
    """Calibration sequences on their way through the layers of a model."""

    def __init__(self, model: Decoder, sequences: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device):
        self._model = model
        self._states: list[tuple[Step, torch.Tensor, torch.Tensor | None]] = []
        per_batch = max(1, BATCH_TOKENS // max(map(len, sequences)))
        batches = [sequences[first : first + per_batch] for first in range(0, len(sequences), per_batch)]
        num_blocks = 0
        for batch in batches:
            step, needed = _step_of(batch, dtype, device)
            num_blocks = max(num_blocks, needed)
            self._states.append((step, model.embed(step), None))
        shape = model.kv_shape
        self._cache = LayerCache(
            *(
                torch.empty(
                    num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=device
                )
                for _ in range(2)
            )
        )

    def quantize(self, layer: Any, options: GptqOptions) -> Iterator[tuple[str, GptqMatrix]]:
        """The matrices of the next layer. Afterwards the sequences are where the quantized layer leaves them."""
        weights = calibrated_in(layer)
        for step, x, residual in self._states:
            layer(x.clone(), None if residual is None else residual.clone(), self._cache, step)
        for weight in weights:
            yield from weight.quantize(options)
        self._states = [(step, *layer(x, residual, self._cache, step)) for step, x, residual in self._states]
        for weight in weights:
            weight.release()


def _step_of(sequences: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> tuple[Step, int]:
    """All sequences as whole prompts, and the blocks that they need."""
    needed = [-(-len(ids) // BLOCK_SIZE) for ids in sequences]
    rows, first = Rows(len(sequences), max(needed), device), 1
    for row, (ids, count) in enumerate(zip(sequences, needed, strict=True)):
        rows.admit(row, row, list(ids), 0, False)
        rows.append_blocks(row, list(range(first, first + count)))
        first += count
    rows.write_blocks()
    parts = [rows.advance(row, len(ids)) for row, ids in enumerate(sequences)]
    return prepare(rows, parts, BLOCK_SIZE, dtype), first
