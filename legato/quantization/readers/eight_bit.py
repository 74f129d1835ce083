"""8-bit numbers with scales: `fp8` (AutoFP8, DeepSeek, Qwen), fbgemm, ModelOpt, and compressed-tensors' int8 and FP8.

    P.weight        [N, K] float8 or int8
    P.weight_scale  one number, [N] or [N, 1], [N, K/G], or blocks [⌈N/128⌉, ⌈K/128⌉]; it multiplies, also where it
                    is called weight_scale_inv

Scales of activations are not used: a product keeps its activations in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.quantization.matrix import ColumnGroups, QuantizedMatrix
from legato.quantization.schemes import GroupedIntegers, ScaledMatrix
from legato.quantization.stored import MatrixSlice, StoredTensors

SCALES = ("weight_scale_inv", "weight_scale")
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# Scales of activations, and of the KV cache, which `kv_scales.py` reads.
ACTIVATION_SCALES = (
    ".input_scale", ".input_scale_ub", ".input_zero_point", ".activation_scale", ".output_scale", ".output_zero_point",
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_zero_point", ".v_zero_point", ".prob_output_scale",
)  # fmt: skip


@dataclass(frozen=True)
class EightBitReader:
    block: tuple[int, int] | None = None  # outputs and inputs of a block
    unread: tuple[str, ...] = ACTIVATION_SCALES

    def has(self, name: str, tensors: StoredTensors) -> bool:
        weight = f"{name}.weight"
        return weight in tensors and tensors.stored_dtype(weight) in DTYPES

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix:
        weight = f"{wanted.name}.weight"
        names = [f"{wanted.name}.{ending}" for ending in SCALES]
        scale_name = next((name for name in names if name in tensors), None)
        if scale_name is None:
            raise tensors.fault(weight, f"has no scale: the checkpoint has no tensor '{names[1]}'")
        numbers = tensors.raw(weight, (wanted.out_features, wanted.in_features), wanted.cut())
        scale, size = self._scale(scale_name, wanted, tensors)
        scale = scale.expand(numbers.shape[0], -1).contiguous()
        groups = ColumnGroups.regular(wanted.in_features, size)
        zero = self._zero(wanted, scale, tensors)
        if zero is None:
            return wanted.of_columns(ScaledMatrix(groups, scale, numbers))
        codes, zero = ((tensor.int() + 128).to(torch.uint8) for tensor in (numbers, zero))
        return wanted.of_columns(GroupedIntegers.of(codes, 8, scale, zero, groups))

    def _zero(self, wanted: MatrixSlice, scale: torch.Tensor, tensors: StoredTensors) -> torch.Tensor | None:
        """Of int8 numbers. Where quantization is symmetric, some checkpoints have zeros nevertheless."""
        name = f"{wanted.name}.weight_zero_point"
        if name not in tensors:
            return None
        shape = tensors.stored_shape(name)
        cut = wanted.cut() if shape and shape[0] == wanted.out_features else None
        zero = tensors.raw(name, shape, cut)
        if zero.is_meta or not bool(zero.any()):
            return None
        if zero.dtype != torch.int8 or zero.numel() not in (1, scale.numel()):
            raise tensors.fault(name, f"has type {zero.dtype} and shape {shape}; expected an int8 for each scale")
        return zero.view(-1, 1).expand(scale.shape) if zero.numel() == 1 else zero.view(scale.shape)

    def _scale(self, name: str, wanted: MatrixSlice, tensors: StoredTensors) -> tuple[torch.Tensor, int]:
        """[our outputs or 1, groups], and the size of a group; 0: the whole row."""
        shape = tensors.stored_shape(name)
        counts = tuple(size for size in shape if size != 1)
        num_outputs, num_inputs = wanted.out_features, wanted.in_features
        if not counts:
            return tensors.raw(name, shape).reshape(1, 1), 0
        if self.block is not None:
            rows, columns = self.block
            expected = (-(-num_outputs // rows), -(-num_inputs // columns))
            if counts != tuple(size for size in expected if size != 1):
                raise tensors.fault(name, f"has shape {shape}; blocks of {rows} x {columns} make {expected}")
            blocks = tensors.raw(name, shape).reshape(expected)
            return blocks[wanted.places(blocks.device) // rows], columns
        if shape[0] == num_outputs and len(shape) <= 2:
            scale = tensors.raw(name, shape, wanted.cut())
            num_groups = 1 if len(shape) == 1 else shape[1]
            if num_inputs % num_groups == 0:
                return scale.view(-1, num_groups), num_inputs // num_groups
        raise tensors.fault(
            name, f"has shape {shape}; expected one scale, or one for each of {num_outputs} outputs and maybe group"
        )
