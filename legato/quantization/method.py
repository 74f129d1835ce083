"""How a model's matrices are quantized: by its checkpoint, on load, or not at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import torch

from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.stored import MatrixSlice, Reader

# Products of fewer weights have the `small_quantizer`. On a GPU starting such a product takes longer than reading its
# weights, and models that have no larger ones lose most from rounding.
SMALL_PRODUCT = 1 << 21
# Of the layer, in the name of a matrix.
NUMBER = re.compile(r"\.(\d+)\.")


class Quantizer(Protocol):
    """Quantizes dense matrices on load."""

    @property
    def group_size(self) -> int:
        """Columns whose numbers decide about each other's codes; 0: a whole row."""
        ...

    def __call__(self, matrix: torch.Tensor) -> QuantizedMatrix:
        """[out, in], floating point."""
        ...


@dataclass(frozen=True, slots=True)
class Method:
    name: str  # for the log and for errors
    reader: Reader | None = None  # of matrices that are quantized in the checkpoint
    quantizer: Quantizer | None = None  # of matrices that are not
    precise_quantizer: Quantizer | None = None  # of those of attention and of the last layer; None: the same
    small_quantizer: Quantizer | None = None  # of those in products of few weights; None: the same
    has_kv_scales: bool = False  # the checkpoint may have scales for a KV cache of 8 bits
    num_layers: int = 0  # of the whole model; 0: not known

    def quantizer_of(self, wanted: MatrixSlice) -> Quantizer | None:
        if self.small_quantizer and wanted.product_size is not None and wanted.product_size < SMALL_PRODUCT:
            return self.small_quantizer
        is_precise = wanted.is_attention or (wanted.product_size is not None and self._is_in_last_layer(wanted.name))
        return (is_precise and self.precise_quantizer) or self.quantizer

    def _is_in_last_layer(self, name: str) -> bool:
        found = NUMBER.search(name)
        return found is not None and int(found[1]) == self.num_layers - 1


DENSE = Method("none")
