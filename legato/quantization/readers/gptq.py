"""GPTQ: AutoGPTQ, GPTQModel, optimum, and what `text-generation-server quantize` writes.

P.qweight  [K·bits/32, N] int32   codes, packed along the inputs
P.qzeros   [K/G, N·bits/32] int32 zeros, packed along the outputs; minus one, except in version 2
P.scales   [K/G, N] fp16          weight = scale · (code - zero)
P.g_idx    [K] int32              the group of each input; all zero or absent: in order
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from legato.common.errors import UnsupportedModel
from legato.quantization.matrix import ColumnGroups, QuantizedMatrix, grouped_columns
from legato.quantization.schemes import GroupedIntegers
from legato.quantization.stored import MatrixSlice, StoredTensors, read_packed

BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class GptqReader:
    bits: int
    group_size: int  # -1: one group
    is_v2: bool = False  # zeros are stored as they are
    has_act_order: bool = False  # what `g_idx` decides, where tensors are only counted
    # Regular expression -> what is different for the modules that match.
    overrides: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unread: tuple[str, ...] = ("gptq_bits", "gptq_groupsize", "gptq_sym")

    def has(self, name: str, tensors: StoredTensors) -> bool:
        return f"{name}.qweight" in tensors

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix:
        name, num_outputs, num_inputs = wanted.name, wanted.out_features, wanted.in_features
        bits, size = self._parameters(name)
        group_size = size if size > 0 else num_inputs
        num_groups = -(-num_inputs // group_size)
        self._check_groups(name, num_groups, group_size, tensors)
        codes = read_packed(tensors, f"{name}.qweight", (num_inputs, num_outputs), 0, bits, wanted.cut(1))
        zeros = read_packed(tensors, f"{name}.qzeros", (num_groups, num_outputs), 1, bits, wanted.cut(1))
        if not self.is_v2:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        scales = tensors.raw(f"{name}.scales", (num_groups, num_outputs), wanted.cut(1))
        groups = ColumnGroups.regular(num_inputs, group_size)
        index = self._group_of(name, num_inputs, num_groups, tensors)
        if index is not None:
            inputs = torch.arange(num_inputs, device=index.device)
            groups, places, left = grouped_columns(index, inputs, group_size)
            codes, scales, zeros = codes[places], scales[left], zeros[left]
        codes = codes.t()
        return wanted.of_columns(GroupedIntegers.of(codes, bits, scales.t(), zeros.t().contiguous(), groups))

    def _parameters(self, name: str) -> tuple[int, int]:
        for pattern, changes in self.overrides.items():
            if re.match(pattern, name):
                return changes.get("bits", self.bits), changes.get("group_size", self.group_size)
        return self.bits, self.group_size

    def _check_groups(self, name: str, num_groups: int, group_size: int, tensors: StoredTensors) -> None:
        found = tensors.stored_shape(f"{name}.scales")
        if found[0] != num_groups:
            raise tensors.fault(
                f"{name}.scales", f"has {found[0]} groups; a group size of {group_size} makes {num_groups}"
            )

    def _group_of(self, name: str, num_inputs: int, num_groups: int, tensors: StoredTensors) -> torch.Tensor | None:
        """The group of each input; None: in order."""
        if f"{name}.g_idx" not in tensors:
            return None
        index = tensors.raw(f"{name}.g_idx", (num_inputs,)).long()
        if index.is_meta:
            return index if self.has_act_order else None
        if not bool(((index >= 0) & (index < num_groups)).all()):
            raise tensors.fault(f"{name}.g_idx", f"refers to groups beyond the last of {num_groups}")
        return index if bool(index.any()) else None


def check_bits(bits: int, checkpoint_format: str, where: str) -> None:
    if bits not in BITS:
        raise UnsupportedModel(
            f"{where}: GPTQ with {bits} bits is not supported; supported: {', '.join(map(str, BITS))}"
        )
    if checkpoint_format == "gptq_p" and bits == 3:
        raise UnsupportedModel(f"{where}: the planar layout 'gptq_p' of 3-bit weights is not supported")
