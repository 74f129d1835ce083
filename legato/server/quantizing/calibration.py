"""A model that is run layer by layer over calibration text, and quantized on the way.

`CalibratedWeights` builds the model without its matrices. A layer's matrices are read when the layer is first run, are
quantized one after the other, each with the inputs that those before leave it, and are given up before the next layer:
memory is that of one layer, dense and quantized. The text goes through the dense model, too, because the inputs that a
matrix has there are what its products should be of (`Hessian.moved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from legato.layers.kv_cache import LayerCache
from legato.layers.step import Step
from legato.models.decoder import Decoder
from legato.models.sources import TensorSource
from legato.models.targets import MatrixPart
from legato.models.weights import Weights
from legato.quantization.calibration_products import linear, rounded
from legato.quantization.dense import Weight
from legato.quantization.experts import ExpertWeights, QuantizedExperts
from legato.quantization.gptq import GptqMatrix, GptqOptions, Hessian, quantize
from legato.server.prepare import prepare
from legato.server.rows import Rows

BLOCK_SIZE = 16
# Tokens that go through a layer at once.
BATCH_TOKENS = 2048

Dense = tuple[str, torch.Tensor]  # name without `.weight`, [out, in]


class InputSeen(Exception):
    """The weight whose inputs are wanted has them: the rest of the layer need not be computed."""


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
        self.is_dense = True  # multiplies with the dense matrix, also when there is a quantized one
        self.watch: Callable[[torch.Tensor], None] | None = None  # is called with the inputs
        self._read = read
        self._bias = bias
        self._rows = rows  # of each matrix
        self._order = order  # of all rows
        self._matrices: list[Dense] = []
        self._product: torch.Tensor | None = None
        self._quantized: torch.Tensor | None = None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if self.watch is not None:
            self.watch(x)
        self.load()
        matrix = self._product if self.is_dense or self._quantized is None else self._quantized
        assert matrix is not None
        return linear(x, matrix, self._bias)

    @property
    def in_features(self) -> int:
        self.load()
        return self._matrices[0][1].shape[1]

    def load(self) -> None:
        if self._product is None:
            self._matrices = self._read()
            self._product = self._stacked([matrix for _, matrix in self._matrices])

    def quantize(self, hessian: Hessian, options: GptqOptions) -> Iterator[tuple[str, GptqMatrix]]:
        """From now on there is a product of quantized matrices, too."""
        self.load()
        made, value = [], hessian.value
        for name, matrix in self._matrices:
            quantized = quantize(hessian.moved(matrix, options.damping), value, options)
            made.append(quantized.dense().to(matrix.dtype))
            yield name, quantized
        self._matrices = []
        self._quantized = self._stacked(made)

    def release(self) -> None:
        self._product = self._quantized = None

    def _stacked(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        product = torch.cat([matrix[rows] for matrix, rows in zip(matrices, self._rows, strict=True)])
        return rounded(product if self._order is None else product[self._order])


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


def calibrated_in(layer: object) -> list[list[CalibratedWeight]]:
    """The weights of a layer, in the order of its attributes; those of experts are together."""
    found: list[list[CalibratedWeight]] = []
    seen: set[int] = set()

    def look(value: Any) -> None:
        if isinstance(value, CalibratedWeight):
            value = [value]
        if isinstance(value, list | tuple):
            if new := [each for each in value if isinstance(each, CalibratedWeight) and id(each) not in seen]:
                seen.update(map(id, new))
                found.append(new)
            for each in value:
                if not isinstance(each, CalibratedWeight):
                    look(each)
        elif type(value).__module__.startswith("legato.") and hasattr(value, "__dict__"):
            for each in vars(value).values():
                look(each)

    look(layer)
    return found


State = tuple[Step, torch.Tensor, torch.Tensor | None]


class Calibration:
    """Calibration sequences on their way through the layers of a model, and of the quantized one."""

    def __init__(self, model: Decoder, sequences: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device):
        self._model = model
        self._dense: list[State] = []
        per_batch = max(1, BATCH_TOKENS // max(map(len, sequences)))
        batches = [sequences[first : first + per_batch] for first in range(0, len(sequences), per_batch)]
        self._num_blocks = self._num_layers = 0
        for batch in batches:
            step, needed = _step_of(batch, dtype, device)
            self._num_blocks = max(self._num_blocks, needed)
            self._dense.append((step, model.embed(step), None))
        self._quantized = list(self._dense)
        self._cache: LayerCache | None = None  # of the layer that is computed

    def quantize(self, layer: Any, options: GptqOptions) -> Iterator[tuple[str, GptqMatrix]]:
        """The matrices of the next layer. Afterwards the sequences are where the layer leaves them."""
        device = self._dense[0][1].device
        self._cache = None  # before there is another one
        self._cache = self._model.kv_shape.allocate(self._num_layers, self._num_blocks, BLOCK_SIZE, device)
        self._num_layers += 1
        stages = calibrated_in(layer)
        weights = [weight for stage in stages for weight in stage]
        for stage in stages:
            hessians = self._hessians(layer, weights, stage)
            for weight in stage:
                yield from weight.quantize(hessians.pop(0), options)
        self._dense = [self._run(layer, weights, state, is_dense=True) for state in self._dense]
        self._quantized = [self._run(layer, weights, state, is_dense=False) for state in self._quantized]
        for weight in weights:
            weight.release()

    def _hessians(self, layer: Any, weights: list[CalibratedWeight], stage: list[CalibratedWeight]) -> list[Hessian]:
        """Of the inputs of each weight of the stage. Of experts only those of the quantized model are seen: tokens may
        have others in the dense one."""
        device = self._dense[0][1].device
        if len(stage) > 1:
            found = [Hessian(weight.in_features, device) for weight in stage]
            for weight, hessian in zip(stage, found, strict=True):
                weight.watch = hessian.add
            for state in self._quantized:
                self._run(layer, weights, state, is_dense=False)
            for weight in stage:
                weight.watch = None
            return found
        hessian = Hessian(stage[0].in_features, device)
        for dense, quantized in zip(self._dense, self._quantized, strict=True):
            x = self._inputs(layer, weights, stage[0], quantized, is_dense=False)
            if x is not None:
                hessian.add(x, self._inputs(layer, weights, stage[0], dense, is_dense=True))
        return [hessian]

    def _inputs(
        self, layer: Any, weights: list[CalibratedWeight], weight: CalibratedWeight, state: State, is_dense: bool
    ) -> torch.Tensor | None:
        """Of one weight, which is the last that is computed. None if the layer does not come to it."""
        seen: list[torch.Tensor] = []

        def watch(x: torch.Tensor) -> None:
            seen.append(x)
            raise InputSeen

        weight.watch = watch
        try:
            self._run(layer, weights, state, is_dense)
        except InputSeen:
            pass
        finally:
            weight.watch = None
        return seen[0] if seen else None

    def _run(self, layer: Any, weights: list[CalibratedWeight], state: State, is_dense: bool) -> State:
        for weight in weights:
            weight.is_dense = is_dense
        step, x, residual = state
        # Layers may write to what they are given.
        return step, *layer(x.clone(), None if residual is None else residual.clone(), self._cache, step)


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
