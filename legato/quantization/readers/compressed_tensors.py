"""compressed-tensors of llm-compressor: integers of 2 to 8 bits, int8, FP8, MXFP4 and NVFP4.

pack-quantized   P.weight_packed [N, ⌈K·bits/32⌉] int32, a bit stream along the inputs; P.weight_scale [N, K/G];
                 P.weight_zero_point [⌈N·bits/32⌉, K/G] int32, packed along the outputs; P.weight_g_idx [K]
int-quantized    P.weight [N, K] int8 and
float-quantized  P.weight [N, K] float8, both as in `eight_bit.py`
mxfp4, nvfp4     as in `tables.py`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from legato.quantization.matrix import ColumnGroups, QuantizedMatrix, grouped_columns
from legato.quantization.packing import WORD, packed_len, unpack_padded_words, unpack_words
from legato.quantization.readers.eight_bit import ACTIVATION_SCALES, EightBitReader
from legato.quantization.readers.tables import Fp4Reader
from legato.quantization.schemes import GroupedIntegers
from legato.quantization.stored import MatrixSlice, Reader, StoredTensors, read_typed

PACKED, INT8, FP8 = "pack-quantized", "int-quantized", "float-quantized"
MXFP4, NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
FORMATS = (PACKED, INT8, FP8, MXFP4, NVFP4)
ANY_LINEAR = "Linear"


@dataclass(frozen=True)
class TargetGroup:
    """Modules that are quantized in one way: by class, by name, or by regular expression after `re:`."""

    targets: tuple[str, ...]
    format: str
    bits: int
    block: tuple[int, int] | None = None

    def names(self, module: str) -> bool:
        return any(
            re.match(target[3:], module) is not None if target.startswith("re:") else module.endswith(target)
            for target in self.targets
        )


@dataclass(frozen=True)
class CompressedTensorsReader:
    groups: Sequence[TargetGroup]
    unread: tuple[str, ...] = (*ACTIVATION_SCALES, ".input_global_scale", ".weight_shape")

    def has(self, name: str, tensors: StoredTensors) -> bool:
        return f"{name}.weight_packed" in tensors or EightBitReader().has(name, tensors)

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix | torch.Tensor:
        return self._reader(self._group(wanted.name)).read(wanted, tensors)

    def _group(self, name: str) -> TargetGroup:
        named = [group for group in self.groups if group.names(name)]
        return next(iter(named or [group for group in self.groups if ANY_LINEAR in group.targets]), self.groups[0])

    def _reader(self, group: TargetGroup) -> Reader:
        if group.format == PACKED:
            return PackedReader(group.bits)
        if group.format == NVFP4:
            return Fp4Reader(global_scale="weight_global_scale", divides=True)
        return Fp4Reader() if group.format == MXFP4 else EightBitReader(group.block)


@dataclass(frozen=True)
class PackedReader:
    bits: int
    unread: tuple[str, ...] = ()

    def has(self, name: str, tensors: StoredTensors) -> bool:
        return f"{name}.weight_packed" in tensors

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix:
        name, num_inputs = wanted.name, wanted.in_features
        codes = self._codes(wanted, tensors)
        num_groups = tensors.stored_shape(f"{name}.weight_scale")[-1]
        if num_groups == 0 or num_inputs % num_groups:
            raise tensors.fault(
                f"{name}.weight_scale", f"has {num_groups} groups, which do not divide {num_inputs} inputs"
            )
        scale = tensors.raw(f"{name}.weight_scale", (wanted.out_features, num_groups), wanted.cut())
        zero = self._zero(wanted, num_groups, tensors)
        groups = ColumnGroups.regular(num_inputs, num_inputs // num_groups)
        if f"{name}.weight_g_idx" in tensors:
            index = tensors.raw(f"{name}.weight_g_idx", (num_inputs,)).long()
            if not index.is_meta and bool((index >= num_groups).any()):
                raise tensors.fault(f"{name}.weight_g_idx", f"refers to groups beyond the last of {num_groups}")
            if index.is_meta or bool((index >= 0).all()):  # -1: in order
                inputs = torch.arange(num_inputs, device=index.device)
                groups, places, left = grouped_columns(index, inputs, num_inputs // num_groups)
                codes, scale = codes[:, places], scale[:, left]
                zero = None if zero is None else zero[:, left]
        return wanted.of_columns(GroupedIntegers.of(codes, self.bits, scale, zero, groups))

    def _codes(self, wanted: MatrixSlice, tensors: StoredTensors) -> torch.Tensor:
        name, count = f"{wanted.name}.weight_packed", wanted.in_features
        shape = tensors.stored_shape(name)
        dense, padded = packed_len(count, self.bits), -(-count // (WORD // self.bits))
        if shape[-1] == padded != dense:  # before version 0.13
            return unpack_padded_words(read_typed(tensors, name, shape, torch.int32, wanted.cut()), self.bits, count)
        words = read_typed(tensors, name, (wanted.out_features, dense), torch.int32, wanted.cut())
        return unpack_words(words, self.bits, 1, count)

    def _zero(self, wanted: MatrixSlice, num_groups: int, tensors: StoredTensors) -> torch.Tensor | None:
        name = f"{wanted.name}.weight_zero_point"
        if name not in tensors:
            return None
        count, shape = wanted.out_features, tensors.stored_shape(name)
        if tensors.stored_dtype(name) == torch.int8:
            signed = tensors.raw(name, (count, num_groups), wanted.cut())
            return (signed.int() + (1 << (self.bits - 1))).to(torch.uint8)
        stored = read_typed(tensors, name, shape, torch.int32)
        dense, padded = packed_len(count, self.bits), -(-count // (WORD // self.bits))
        if shape == (padded, num_groups) and padded != dense:
            zero = unpack_padded_words(stored.t(), self.bits, count).t()
        elif shape == (dense, num_groups):
            zero = unpack_words(stored, self.bits, 0, count)
        else:
            raise tensors.fault(name, f"has shape {shape}, ({dense}, {num_groups}) expected")
        return zero[wanted.places(zero.device)]
