"""Weights on a CPU: packed for the C library or, without it, for torch's own int8 product.

GGUF Q4_0, Q4_1, Q4_K; 4-bit integers of GPTQ and AWQ    4 bits, as they are
GGUF Q6_K                                                6 bits, as they are; 8 for AMX, which multiplies bytes
GGUF Q8_0; int8; 8-bit integers without zeros            8 bits, as they are
everything else                                          rounded to 8 bits, groups of 32
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch

from legato.cpu.library import GROUP, library
from legato.cpu.packed import PackedMatrix, PackedRows, can_stack, pack_4, pack_8, pack_dense, pack_k
from legato.quantization.affine import AffineGroups, KGroups
from legato.quantization.dense import Weight, dense_weight
from legato.quantization.matrix import QuantizedMatrix
from legato.quantization.packing import code_width, unpack_codes
from legato.quantization.schemes import GroupedIntegers, ScaledMatrix
from legato.quantization.weight import Matrix, StackedWeight

# Engines of torch that have a fast int8 product.
INT8_ENGINES = ("x86", "fbgemm", "onednn")


class HostWeight:
    """A packed matrix, maybe with a bias, multiplied by the C library."""

    def __init__(self, packed: PackedMatrix) -> None:
        self.packed = packed
        self.out_features = packed.out_features
        self.nbytes = packed.nbytes
        self.kinds = [f"{part.bits}-bit, packed" for part in packed.parts]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.apply(x)

    def with_bias(self, bias: torch.Tensor) -> HostWeight:
        """The same blocks with a bias."""
        return HostWeight(PackedMatrix(self.packed.parts, bias))


class TorchInt8Weight:
    """int8 by row, with torch's own product. It quantizes activations by tensor: rows are not independent here."""

    kinds = ("8-bit: torch",)

    def __init__(self, matrix: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, _ = matrix.shape
        scale = (matrix.abs().amax(1).double() / 127).clamp_(min=1e-12)
        zeros = torch.zeros(self.out_features, dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch means to remove it, and has nothing in its place yet
            quantized = torch.quantize_per_channel(matrix, scale, zeros, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(quantized, bias)
        self.nbytes = matrix.numel()

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        # Without VNNI pairs of products saturate at 16 bits, unless activations have 7.
        product: torch.Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, reduce_range=not _has_vnni())
        return product


@cache
def _has_vnni() -> bool:
    return bool(torch.cpu._is_vnni_supported())


def host_weight(
    matrices: Sequence[Matrix], bias: torch.Tensor | None = None, order: torch.Tensor | None = None
) -> Weight:
    """One weight of matrices above each other, as `weight_of` makes it on other devices."""
    if order is not None:
        matrices = [torch.cat([_dense(matrix) for matrix in matrices])[order]]
        bias = None if bias is None else bias[order]
    if library() is not None:
        parts = [pack(matrix) for matrix in matrices]
        if can_stack(parts):
            return HostWeight(PackedMatrix(parts, bias))
        return StackedWeight([HostWeight(PackedMatrix([part])) for part in parts], bias, None)
    dense = torch.cat([_dense(matrix) for matrix in matrices])
    if any(engine in torch.backends.quantized.supported_engines for engine in INT8_ENGINES):
        return TorchInt8Weight(dense, bias)
    return dense_weight(dense, bias)


def pack(matrix: Matrix) -> PackedRows:
    if isinstance(matrix, torch.Tensor):
        return pack_dense(matrix)
    if isinstance(matrix, AffineGroups):
        return pack_4(matrix.codes, matrix.scale, matrix.minimum)
    if isinstance(matrix, KGroups) and (matrix.bits == 4 or not _multiplies_bytes()):
        return pack_k(matrix.codes, matrix.scale, matrix.minimum, matrix.first, matrix.second)
    if isinstance(matrix, ScaledMatrix) and matrix.numbers.dtype == torch.int8 and _fits_groups(matrix):
        return pack_8(matrix.numbers.clamp(min=-127), _by_group(matrix, matrix.scale))
    if isinstance(matrix, GroupedIntegers) and matrix.minimum is not None:
        return pack_dense(matrix.dense(torch.float32))
    if isinstance(matrix, GroupedIntegers) and matrix.bits == 8 and matrix.zero is None and _fits_groups(matrix):
        return pack_8((matrix.codes ^ 0x80).view(torch.int8).clamp(min=-127), _by_group(matrix, matrix.scale))
    if isinstance(matrix, GroupedIntegers) and matrix.bits == 4 and _fits_groups(matrix):
        return _pack_integers(matrix)
    return pack_dense(matrix.dense(torch.float32))


def _multiplies_bytes() -> bool:
    found = library()
    return found is not None and found.instruction_set == "amx"


def _pack_integers(matrix: GroupedIntegers) -> PackedRows:
    codes = unpack_codes(matrix.codes, code_width(4), matrix.in_features).unflatten(1, (-1, GROUP))
    halves = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    scale = matrix.scale.float()
    minimum = scale * -(8 if matrix.zero is None else matrix.zero.float())
    return pack_4(halves.flatten(1), _by_group(matrix, scale), _by_group(matrix, minimum))


def _fits_groups(matrix: QuantizedMatrix) -> bool:
    """Whether columns are in order and their groups are whole groups of ours."""
    groups = matrix.groups
    is_regular = groups.index is None and groups.order is None
    return is_regular and groups.num_columns % GROUP == 0 and groups.size % GROUP == 0


def _by_group(matrix: QuantizedMatrix, numbers: torch.Tensor) -> torch.Tensor:
    """[out, groups of the scheme] -> [out, groups of ours] float16."""
    count = matrix.in_features // GROUP
    index = torch.arange(count) * GROUP // matrix.groups.size
    return numbers[:, index].half()


def _dense(matrix: Matrix) -> torch.Tensor:
    return matrix if isinstance(matrix, torch.Tensor) else matrix.dense(torch.float32)
