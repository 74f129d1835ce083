"""Matrices of a GGUF file as codes, for products that do not expand them."""

from __future__ import annotations

import warnings
from collections import Counter

import torch

from legato.modelfiles.gguf.file import GgmlType
from legato.models.expert_matrices import between_groups
from legato.models.gguf_source import GgufSource
from legato.models.sources import Staging
from legato.quantization.affine import CODED, read_codes
from legato.quantization.gguf_forms import FORMS, packed_matrix
from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.stored import MatrixSlice, StoredTensors

# Types that are numbers as they are: a model of them is not quantized.
PLAIN = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


class GgufFormReader:
    """A `Reader` for GPUs: blocks go to the device and become operands of its kernels there. Types without a form, and
    matrices that are cut within a group, are read as dense."""

    unread: tuple[str, ...] = ()

    def __init__(self, source: GgufSource, device: torch.device) -> None:
        self._source = source
        self._staging = Staging(device)
        self._device = device
        self._dense: dict[str, str] = {}  # matrices that are dense here -> why

    def has(self, name: str, tensors: StoredTensors) -> bool:
        weight = f"{name}.weight"
        if weight not in self._source.names():
            return False
        kind = self._source.stored(weight).type
        if kind not in FORMS and kind not in PLAIN:
            self._dense[name] = kind.name
        return kind in FORMS

    @property
    def dense_matrices(self) -> dict[str, int]:
        """Quantized in the file and not here, by type: how many."""
        return dict(Counter(self._dense.values()))

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix | torch.Tensor:
        name = f"{wanted.name}.weight"
        check_shape(wanted, tensors)
        tensors.skip(name)  # it is read here
        matrix = packed_matrix(self._blocks(wanted), self._source.stored(name).type)
        self._source.forget(name)
        columns = wanted.columns
        if columns is None or between_groups(columns, matrix.groups.size):
            return wanted.of_columns(matrix)
        self._dense[wanted.name] = f"{self._source.stored(name).type.name}, cut within a group"
        return matrix.dense(tensors.dtype)[:, slice(*columns)].contiguous()

    def _blocks(self, wanted: MatrixSlice) -> torch.Tensor:
        """Of the wanted outputs, on the device."""
        name = f"{wanted.name}.weight"
        blocks, order = self._source.blocks(name), self._source.row_order(name)
        if wanted.rows is not None or order is not None:
            places = wanted.places(torch.device("cpu"))
            blocks = blocks[(places if order is None else order[places]).numpy()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a mapped file is not writable, and nobody writes
            found = torch.from_numpy(blocks)
        return self._staging.copy(found)


def check_shape(wanted: MatrixSlice, tensors: StoredTensors) -> None:
    name = f"{wanted.name}.weight"
    found, shape = tensors.stored_shape(name), (wanted.out_features, wanted.in_features)
    if found != shape:
        raise tensors.fault(name, f"has shape {found}, the configuration says {shape}")


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
        check_shape(wanted, tensors)
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
