"""Matrices of a GGUF file as codes, for products that do not expand them."""

from __future__ import annotations

import torch

from legato.models.gguf_source import GgufSource
from legato.quantization.affine import CODED, read_codes
from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.stored import MatrixSlice, StoredTensors


class GgufReader:
    """A `Reader` for one shard that has whole matrices. Types without a product of their own are read as dense."""

    unread: tuple[str, ...] = ()

    def __init__(self, source: GgufSource) -> None:
        self._source = source

    def has(self, name: str, tensors: StoredTensors) -> bool:
        weight = f"{name}.weight"
        return weight in self._source.names() and self._source.stored(weight).type in CODED

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix | torch.Tensor:
        name = f"{wanted.name}.weight"
        found, shape = tensors.stored_shape(name), (wanted.out_features, wanted.in_features)
        if found != shape:
            raise tensors.fault(name, f"has shape {found}, the configuration says {shape}")
        tensors.skip(name)  # it is read here
        stored = self._source.stored(name)
        matrix = read_codes(self._source.blocks(name), stored.type)
        self._source.forget(name)
        order = self._source.row_order(name)
        if order is not None:
            matrix = matrix[order] if isinstance(matrix, torch.Tensor) else matrix.take(order)
        if isinstance(matrix, torch.Tensor):
            matrix = matrix[wanted.places(matrix.device)]
            return matrix if wanted.columns is None else matrix[:, slice(*wanted.columns)]
        return wanted.of_whole(matrix)
