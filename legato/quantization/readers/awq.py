"""AWQ: 4-bit integers with zeros, in AutoAWQ's layouts `gemm` and `gemv`.

gemm   P.qweight [K, N/8] int32, P.qzeros [K/G, N/8] int32: packed along the outputs, in the order of ORDER
       P.scales  [K/G, N] fp16
gemv   P.qweight [N, K/8] int32, P.qzeros [N, W] int32: packed along the inputs and the groups, in order
       P.scales  [N, 8W] fp16, W such that groups fill whole words
"""

from __future__ import annotations

from dataclasses import dataclass

from legato.quantization.matrix import ColumnGroups, QuantizedMatrix
from legato.quantization.schemes import GroupedIntegers
from legato.quantization.stored import MatrixSlice, StoredTensors, read_packed

BITS = 4
# The nibble of a word that has output 0, 1, … of eight.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AwqReader:
    group_size: int
    version: str = "gemm"
    unread: tuple[str, ...] = ()

    def has(self, name: str, tensors: StoredTensors) -> bool:
        return f"{name}.qweight" in tensors

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix:
        num_inputs = wanted.in_features
        size = self.group_size if self.group_size > 0 else num_inputs
        if num_inputs % size:
            raise tensors.fault(
                f"{wanted.name}.qweight", f"has {num_inputs} inputs, which is not a multiple of group size {size}"
            )
        groups = ColumnGroups.regular(num_inputs, size)
        read = self._gemv if self.version == "gemv" else self._gemm
        return wanted.of_columns(read(wanted, num_inputs // size, groups, tensors))

    def _gemm(
        self, wanted: MatrixSlice, num_groups: int, groups: ColumnGroups, tensors: StoredTensors
    ) -> GroupedIntegers:
        name, num_outputs, cut = wanted.name, wanted.out_features, wanted.cut(1)
        scales = tensors.raw(f"{name}.scales", (num_groups, num_outputs), cut)
        shape = (wanted.in_features, num_outputs)
        codes = read_packed(tensors, f"{name}.qweight", shape, 1, BITS, cut, ORDER)
        zeros = read_packed(tensors, f"{name}.qzeros", (num_groups, num_outputs), 1, BITS, cut, ORDER)
        return GroupedIntegers.of(codes.t(), BITS, scales.t(), zeros.t().contiguous(), groups)

    def _gemv(
        self, wanted: MatrixSlice, num_groups: int, groups: ColumnGroups, tensors: StoredTensors
    ) -> GroupedIntegers:
        name, num_outputs, cut = wanted.name, wanted.out_features, wanted.cut()
        padded = tensors.stored_shape(f"{name}.scales")[-1]
        if padded < num_groups:
            raise tensors.fault(f"{name}.scales", f"has {padded} groups; group size {groups.size} makes {num_groups}")
        scales = tensors.raw(f"{name}.scales", (num_outputs, padded), cut)[:, :num_groups]
        codes = read_packed(tensors, f"{name}.qweight", (num_outputs, wanted.in_features), 1, BITS, cut)
        zeros = read_packed(tensors, f"{name}.qzeros", (num_outputs, padded), 1, BITS, cut)[:, :num_groups]
        return GroupedIntegers.of(codes, BITS, scales, zeros.contiguous(), groups)
