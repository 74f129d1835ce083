"""The checkpoint as a layout reader sees it: named tensors, of which it reads the shard's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from legato.common.errors import ModelFileError
from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.packing import WORD, unpack_words, word_unit

Ranges = Sequence[tuple[int, int]]  # [first, last) of some dimension, in the order wanted


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """A matrix [out, in] of the checkpoint, named without `.weight`, and the part of it that a shard wants."""

    name: str
    out_features: int
    in_features: int
    rows: Ranges | None = None  # outputs; None: all
    columns: tuple[int, int] | None = None  # inputs; None: all
    is_attention: bool = False  # queries, keys, values or the output of attention
    product_size: int | None = None  # weights of all whole matrices that one product stacks; None: not known

    def cut(self, dim: int = 0) -> dict[int, Ranges]:
        """The wanted outputs, where they are dimension `dim` of a tensor."""
        return {} if self.rows is None else {dim: self.rows}

    def places(self, device: torch.device) -> torch.Tensor:
        """The wanted outputs."""
        ranges = self.rows or [(0, self.out_features)]
        return torch.cat([torch.arange(first, last, device=device) for first, last in ranges])

    def of_columns(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """The wanted inputs of a matrix with the wanted outputs."""
        return matrix if self.columns is None else matrix.columns(*self.columns)

    def of_whole(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """The wanted outputs and inputs of a matrix with all of them."""
        return self.of_columns(matrix if self.rows is None else matrix.take(self.places(matrix.device)))


class StoredTensors(Protocol):
    """The tensors of a checkpoint as they are stored. `Weights` implements it; readers call it while a model loads."""

    dtype: torch.dtype  # of the model, for what is not quantized after all

    def __contains__(self, name: str) -> bool: ...

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, which must be there."""
        ...

    def stored_dtype(self, name: str) -> torch.dtype: ...

    def raw(self, name: str, shape: tuple[int, ...], cut: Mapping[int, Ranges] | None = None) -> torch.Tensor:
        """A tensor that must have this shape in the file, on the model's device, in its own dtype."""
        ...

    def skip(self, name: str) -> None:
        """The tensor may be there and need not be read."""
        ...

    def fault(self, name: str, what: str) -> ModelFileError:
        """An error that names the tensor and its file."""
        ...


class Reader(Protocol):
    """A layout of quantized checkpoints. Its fields are what the configuration says."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Endings of tensor names that belong to the layout and are not read."""
        ...

    def has(self, name: str, tensors: StoredTensors) -> bool:
        """Whether the matrix `name` is quantized; others are read as dense ones."""
        ...

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix | torch.Tensor: ...


def read_typed(
    tensors: StoredTensors,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    cut: Mapping[int, Ranges] | None = None,
) -> torch.Tensor:
    """`raw`, where only one type makes sense."""
    if (found := tensors.stored_dtype(name) if name in tensors else dtype) != dtype:
        raise tensors.fault(name, f"has type {found}, not {str(dtype).removeprefix('torch.')}")
    return tensors.raw(name, shape, cut)


def read_packed(
    tensors: StoredTensors,
    name: str,
    shape: tuple[int, int],
    dim: int,
    bits: int,
    cut: Mapping[int, Ranges],
    order: Sequence[int] | None = None,
) -> torch.Tensor:
    """uint8 codes of the matrix `shape` that is packed into int32 words along `dim`. `order` are the places of the
    values in a word, where they are not in order."""
    values, words = word_unit(bits)
    if shape[dim] % values:
        raise tensors.fault(name, f"packs {shape[dim]} values of {bits} bits, which is not a multiple of {values}")
    stored = list(shape)
    stored[dim] = shape[dim] * bits // WORD
    ranges = cut.get(dim, [(0, shape[dim])])
    # Whole units, and as many more values at both ends as they bring.
    units = [(first // values, -(-last // values)) for first, last in ranges]
    cuts = {**cut, dim: [(first * words, last * words) for first, last in units]} if dim in cut else cut
    raw = read_typed(tensors, name, (stored[0], stored[1]), torch.int32, cuts)
    codes = unpack_words(raw, bits, dim, raw.shape[dim] * WORD // bits)
    if order is not None:
        places = torch.tensor(order, device=codes.device)
        codes = codes.unflatten(dim, (-1, len(order))).index_select(dim + 1, places).flatten(dim, dim + 1)
    if dim not in cut:
        return codes
    pieces, begin = [], 0
    for (first, last), (low, high) in zip(ranges, units, strict=True):
        start = begin + first - low * values
        pieces.append(codes.narrow(dim, start, last - first))
        begin += (high - low) * values
    return torch.cat(pieces, dim)
