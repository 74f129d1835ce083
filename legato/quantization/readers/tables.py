"""Four-bit floating point (e2m1) with scales by group: MXFP4 and NVFP4.

P.weight_packed  [N, K/2] uint8   two codes in a byte, the first in the low half (ModelOpt: P.weight)
P.weight_scale   [N, K/32] uint8  MXFP4: 2^(code - 127)
                 [N, K/16] e4m3   NVFP4: times a scale of the tensor, or divided by it
gpt-oss has its experts in P_blocks [experts, N, K/32, 16] and P_scales [experts, N, K/32], both uint8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.quantization.matrix import ColumnGroups, QuantizedMatrix
from legato.quantization.packing import pack_pairs
from legato.quantization.readers.eight_bit import ACTIVATION_SCALES
from legato.quantization.schemes import E2M1, TableCodes
from legato.quantization.stored import MatrixSlice, StoredTensors, read_typed

MX_GROUP, NV_GROUP = 32, 16
EXPONENT_BIAS = 127


def power_of_two(codes: torch.Tensor) -> torch.Tensor:
    """e8m0 scales. bfloat16 has the same range of exponents."""
    return torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes.int() - EXPONENT_BIAS).to(torch.bfloat16)


@dataclass(frozen=True)
class Fp4Reader:
    """Codes in `P.{packed}`. `global_scale` is the name of NVFP4's scale of the whole tensor; None: MXFP4."""

    packed: str = "weight_packed"
    global_scale: str | None = None
    divides: bool = False  # by the scale of the tensor
    unread: tuple[str, ...] = (*ACTIVATION_SCALES, ".input_global_scale")

    def has(self, name: str, tensors: StoredTensors) -> bool:
        codes = f"{name}.{self.packed}"
        return codes in tensors and tensors.stored_dtype(codes) == torch.uint8

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix:
        size = MX_GROUP if self.global_scale is None else NV_GROUP
        num_outputs, num_inputs, name = wanted.out_features, wanted.in_features, wanted.name
        if num_inputs % size:
            raise tensors.fault(f"{name}.{self.packed}", f"has {num_inputs} inputs, which is not a multiple of {size}")
        scale_name, shape, cut = f"{name}.weight_scale", (num_outputs, num_inputs // size), wanted.cut()
        if self.global_scale is None:
            scale = power_of_two(read_typed(tensors, scale_name, shape, torch.uint8, cut))
        else:
            scale = tensors.raw(scale_name, shape, cut)
            whole_name = f"{name}.{self.global_scale}"
            whole = tensors.raw(whole_name, tensors.stored_shape(whole_name)).float().flatten()[:1]
            scale = scale.float() / whole if self.divides else scale.float() * whole
        codes = tensors.raw(f"{name}.{self.packed}", (num_outputs, num_inputs // 2), wanted.cut())
        groups = ColumnGroups.regular(num_inputs, size)
        return wanted.of_columns(TableCodes(groups, scale, pack_pairs(codes), E2M1))


@dataclass(frozen=True)
class GptOssReader:
    """All experts of a layer as one matrix [experts N, K]."""

    unread: tuple[str, ...] = ()

    def has(self, name: str, tensors: StoredTensors) -> bool:
        return f"{name}_blocks" in tensors

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix:
        num_experts, num_outputs = tensors.stored_shape(f"{wanted.name}_blocks")[:2]
        num_groups = wanted.in_features // MX_GROUP
        if num_experts * num_outputs != wanted.out_features or wanted.in_features % MX_GROUP:
            raise tensors.fault(
                f"{wanted.name}_blocks", f"is not a matrix {wanted.out_features} x {wanted.in_features}"
            )
        shape = (num_experts, num_outputs, num_groups)
        blocks = read_typed(tensors, f"{wanted.name}_blocks", (*shape, MX_GROUP // 2), torch.uint8)
        scales = read_typed(tensors, f"{wanted.name}_scales", shape, torch.uint8)
        groups = ColumnGroups.regular(wanted.in_features, MX_GROUP)
        codes = pack_pairs(blocks.reshape(wanted.out_features, -1))
        matrix = TableCodes(groups, power_of_two(scales).reshape(wanted.out_features, -1), codes, E2M1)
        return wanted.of_whole(matrix)
