"""exl2 of ExLlamaV2: groups of inputs with 2 to 8 bits each.

P.q_weight     [rows, N'] int32   of each group a bit stream down every column; N' is N, filled up to 32
P.q_groups     [2·groups] int16   bits and first row of each group
P.q_scale      [groups, N'/8] int32, 4-bit codes; P.q_scale_max [groups] fp16: scale = (code + 1)² · max / 256
P.q_invperm    [K] int32          its argsort has the inputs in the order of the groups
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from legato.quantization.matrix import ColumnGroups, QuantizedMatrix
from legato.quantization.packing import WORD, packed_len, unpack_words
from legato.quantization.schemes import ColumnParts, GroupedIntegers
from legato.quantization.stored import MatrixSlice, StoredTensors, read_typed

SCALE_BITS = 4
WIDTHS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Exl2Reader:
    unread: tuple[str, ...] = (".q_perm",)

    def has(self, name: str, tensors: StoredTensors) -> bool:
        return f"{name}.q_weight" in tensors

    def read(self, wanted: MatrixSlice, tensors: StoredTensors) -> QuantizedMatrix:
        name, num_inputs = wanted.name, wanted.in_features
        words_shape, table_shape = (tensors.stored_shape(f"{name}.{part}") for part in ("q_weight", "q_groups"))
        num_groups, padded = table_shape[0] // 2, words_shape[1]
        if padded < wanted.out_features:
            raise tensors.fault(f"{name}.q_weight", f"has {padded} outputs, {wanted.out_features} expected")
        table = tensors.raw(f"{name}.q_groups", table_shape).view(-1, 2)
        words = read_typed(tensors, f"{name}.q_weight", words_shape, torch.int32)
        codes = read_typed(tensors, f"{name}.q_scale", (num_groups, packed_len(padded, SCALE_BITS)), torch.int32)
        largest = tensors.raw(f"{name}.q_scale_max", (num_groups,))
        factors = unpack_words(codes, SCALE_BITS, 1, padded).float() + 1
        scale = (factors.square() * (largest.float() / 256)[:, None]).to(torch.float16)  # [groups, N']
        places = tensors.raw(f"{name}.q_invperm", (num_inputs,))
        order = places.argsort()
        if not order.is_meta and not torch.equal(places[order].long(), torch.arange(num_inputs, device=order.device)):
            raise tensors.fault(f"{name}.q_invperm", f"is not an order of {num_inputs} inputs")
        groups = ColumnGroups(num_inputs, num_inputs, order=order.int())
        if table.is_meta:
            parts = _counted(words, scale, num_inputs)
        else:
            parts = self._parts(name, table.tolist(), words, scale, num_inputs, tensors)
        return wanted.of_whole(ColumnParts(groups, parts).rows(0, wanted.out_features))

    def _parts(
        self,
        name: str,
        table: list[list[int]],
        words: torch.Tensor,
        scale: torch.Tensor,
        num_inputs: int,
        tensors: StoredTensors,
    ) -> tuple[GroupedIntegers, ...]:
        """Neighbouring groups of one width become one part."""
        parts: list[GroupedIntegers] = []
        pieces: list[torch.Tensor] = []
        sizes: list[int] = []
        done, first = 0, 0
        for group, (bits, row) in enumerate(table):
            is_last = group + 1 == len(table)
            end = words.shape[0] if is_last else table[group + 1][1]
            count = num_inputs - done if is_last or bits not in WIDTHS else (end - row) * WORD // bits
            if bits not in WIDTHS or count < 1 or packed_len(count, bits) > end - row:
                raise tensors.fault(f"{name}.q_groups", f"has group {group} with {bits} bits and {count} inputs")
            pieces.append(unpack_words(words[row:end], bits, 0, count))
            sizes.append(count)
            done += count
            if is_last or table[group + 1][0] != bits:
                index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(words.device)
                is_regular = all(size == sizes[0] for size in sizes[:-1]) and sizes[-1] <= sizes[0]
                groups = ColumnGroups(len(index), sizes[0] if is_regular else 1, None if is_regular else index.int())
                codes = torch.cat(pieces).t()
                parts.append(GroupedIntegers.of(codes, bits, scale[first : group + 1].t(), None, groups))
                pieces, sizes, first = [], [], group + 1
        return tuple(parts)


def _counted(words: torch.Tensor, scale: torch.Tensor, num_inputs: int) -> tuple[GroupedIntegers, ...]:
    """For counting memory, where the widths of the groups are not known: their mean decides."""
    bits = 4 if words.shape[0] * WORD <= 4 * num_inputs else 8
    codes = torch.empty(words.shape[1], num_inputs, dtype=torch.uint8, device="meta")
    groups = ColumnGroups.regular(num_inputs, -(-num_inputs // scale.shape[0]))
    return (GroupedIntegers.of(codes, bits, scale.t(), None, groups),)
