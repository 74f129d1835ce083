"""bitsandbytes, as transformers saves it: 4-bit tables, maybe with quantized scales, and int8 rows.

4 bit  P.weight [N·K/2, 1] uint8, row by row, the first of two codes in the high half; blocks of 64 numbers
       P.weight.absmax, .quant_map, .quant_state.bitsandbytes__nf4 (JSON), .nested_absmax, .nested_quant_map
8 bit  P.weight [N, K] int8, P.SCB [N] float32: the largest number of each row
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from legato.quantization.matrix import ColumnGroups, QuantizedMatrix
from legato.quantization.packing import pack_codes
from legato.quantization.schemes import FP4, NF4, ScaledMatrix, TableCodes
from legato.quantization.stored import MatrixSlice, StoredTensors

KINDS = {"nf4": NF4, "fp4": FP4}
INT8_SCALE = 1 / 127


@dataclass(frozen=True)
class BitsAndBytesReader:
    unread: tuple[str, ...] = (".weight_format", ".quant_map")

    def has(self, name: str, tensors: StoredTensors) -> bool:
        weight = f"{name}.weight"
        if f"{weight}.absmax" in tensors or f"{name}.SCB" in tensors:
            return True
        return weight in tensors and tensors.stored_dtype(weight) in (torch.int8, torch.uint8)

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix | torch.Tensor:
        weight = f"{wanted.name}.weight"
        for kind in KINDS:
            if (state := f"{weight}.quant_state.bitsandbytes__{kind}") in tensors:
                return self._read_table(wanted, QuantState.read(state, tensors), kind, tensors)
        if f"{wanted.name}.SCB" not in tensors:
            raise tensors.fault(weight, "is quantized, but has neither 'SCB' nor a 'quant_state'")
        numbers = tensors.raw(weight, (wanted.out_features, wanted.in_features), wanted.cut())
        scale = tensors.raw(f"{wanted.name}.SCB", (wanted.out_features,), wanted.cut()).float()[:, None] * INT8_SCALE
        return wanted.of_columns(ScaledMatrix(ColumnGroups.regular(wanted.in_features, 0), scale, numbers))

    def _read_table(
        self, wanted: MatrixSlice, state: QuantState, kind: str, tensors: StoredTensors
    ) -> QuantizedMatrix | torch.Tensor:
        name, shape = f"{wanted.name}.weight", (wanted.out_features, wanted.in_features)
        size = state.block_size
        if state.shape not in (None, list(shape)):
            raise tensors.fault(name, f"is a matrix {state.shape}, the configuration says {shape}")
        count = math.prod(shape)
        packed = tensors.raw(name, tensors.stored_shape(name)).flatten().view(torch.uint8)
        if packed.numel() != -(-count // 2):
            raise tensors.fault(name, f"has {packed.numel()} bytes, {-(-count // 2)} expected")
        absmax = self._absmax(name, -(-count // size), state, tensors)
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[:count]
        groups = ColumnGroups.regular(wanted.in_features, size)
        if wanted.in_features % size == 0:
            scale = absmax.view(wanted.out_features, -1)
            return wanted.of_whole(TableCodes(groups, scale, pack_codes(codes.view(shape), 4), KINDS[kind]))
        # Blocks go on in the next row: no scheme of ours. Such sizes are rare, and the matrix becomes dense.
        table = torch.tensor(KINDS[kind], device=codes.device)
        numbers = (table[codes.int()] * absmax.repeat_interleave(size)[:count]).view(shape).to(tensors.dtype)
        rows = numbers[wanted.places(numbers.device)]
        return rows if wanted.columns is None else rows[:, slice(*wanted.columns)].contiguous()

    def _absmax(self, name: str, num_blocks: int, state: QuantState, tensors: StoredTensors) -> torch.Tensor:
        absmax = tensors.raw(f"{name}.absmax", (num_blocks,))
        if absmax.dtype != torch.uint8:
            return absmax.float()
        size = state.nested_block_size
        table = tensors.raw(f"{name}.nested_quant_map", (256,))
        scales = tensors.raw(f"{name}.nested_absmax", (-(-num_blocks // size),))
        return table[absmax.int()] * scales.repeat_interleave(size)[:num_blocks] + state.nested_offset


@dataclass(frozen=True)
class QuantState:
    """What bitsandbytes says about a matrix, in JSON in a tensor of bytes."""

    shape: Any = None  # [out, in]
    block_size: int = 64
    nested_block_size: int = 256
    nested_offset: float = 0.0

    @classmethod
    def read(cls, name: str, tensors: StoredTensors) -> QuantState:
        raw = tensors.raw(name, tensors.stored_shape(name))
        if raw.is_meta:  # only counted
            return cls()
        try:
            state: Any = json.loads(bytes(raw.cpu().tolist()))
        except ValueError as error:
            raise tensors.fault(name, f"is not valid JSON: {error}") from None
        if not isinstance(state, dict):
            raise tensors.fault(name, "is not a JSON object")
        for key in ("blocksize", "nested_blocksize"):
            if type(value := state.get(key, 1)) is not int or value < 1:
                raise tensors.fault(name, f"has {value!r} as '{key}'; expected a positive number")
        offset = state.get("nested_offset", 0.0)
        if not isinstance(offset, int | float):
            raise tensors.fault(name, f"has {offset!r} as 'nested_offset'; expected a number")
        return cls(state.get("shape"), state.get("blocksize", 64), state.get("nested_blocksize", 256), float(offset))
