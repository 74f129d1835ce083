"""How a model's matrices are quantized: by its checkpoint, on load, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.stored import MatrixSlice, Reader

# Products of fewer weights have the `small_quantizer`. On a GPU starting such a product takes longer than reading its
# weights, and models that have no larger ones lose most from rounding.
SMALL_PRODUCT = 1 << 21


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
    attention_quantizer: Quantizer | None = None  # of those of attention; None: the same
    small_quantizer: Quantizer | None = None  # of those in products of few weights; None: the same
    has_kv_scales: bool = False  # the checkpoint may have scales for a KV cache of 8 bits

    def quantizer_of(self, wanted: MatrixSlice) -> Quantizer | None:
        if self.small_quantizer and wanted.product_size is not None and wanted.product_size < SMALL_PRODUCT:
            return self.small_quantizer
        return (wanted.is_attention and self.attention_quantizer) or self.quantizer


DENSE = Method("none")
