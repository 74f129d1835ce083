"""What all quantized matrices have in common: rows are outputs, and groups of columns share a scale.

Each scheme is a subclass with the tensors that it needs, the first dimension of each being the outputs, and with
`values`, its definition in torch. A checkpoint's layout is read into one of them (`readers/`) or a dense matrix is
quantized into one (`on_load.py`); nothing behind that knows where a matrix came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F

# Numbers that the torch definition dequantizes at once: what stands between codes and product stays small.
NUMBERS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class ColumnGroups:
    """Which columns share a scale. Columns are stored in the order of their groups."""

    num_columns: int
    size: int  # columns of a group, where there is no `index`; the last one may have fewer
    index: torch.Tensor | None = None  # [num_columns] int32: the group of each stored column
    order: torch.Tensor | None = None  # [num_columns] int32: stored column k is input order[k]; None: in order

    @classmethod
    def regular(cls, num_columns: int, size: int) -> ColumnGroups:
        return cls(num_columns, size if 0 < size <= num_columns else num_columns)

    @property
    def num_groups(self) -> int:
        return -(-self.num_columns // self.size) if self.index is None else int(self.index.max()) + 1

    def of_columns(self, device: torch.device) -> torch.Tensor:
        """The group of each stored column."""
        return torch.arange(self.num_columns, device=device) // self.size if self.index is None else self.index

    def spread(self, per_group: torch.Tensor) -> torch.Tensor:
        """[rows, groups] -> [rows, columns]"""
        if self.index is None and per_group.shape[1] * self.size == self.num_columns:
            return per_group.repeat_interleave(self.size, dim=1)
        return per_group.index_select(1, self.of_columns(per_group.device))

    def is_same(self, other: ColumnGroups) -> bool:
        if (self.num_columns, self.size) != (other.num_columns, other.size):
            return False
        return _equal(self.index, other.index) and _equal(self.order, other.order)


def grouped_columns(
    group_of: torch.Tensor, inputs: torch.Tensor, size: int
) -> tuple[ColumnGroups, torch.Tensor, torch.Tensor]:
    """Columns whose groups are `group_of` and which are the inputs `inputs`, sorted by group: the groups, the place of
    each stored column among the given ones, and the groups of the checkpoint that are left, in order."""
    count = len(group_of)
    if group_of.is_meta:  # counted, not loaded
        return ColumnGroups(count, size, order=inputs.int()), inputs.long(), group_of[: -(-count // size)].long()
    place = torch.arange(count, device=group_of.device)
    if not bool((group_of.diff() >= 0).all()):
        place = torch.argsort(group_of, stable=True)
    left, index = torch.unique(group_of[place], return_inverse=True)
    is_regular = torch.equal(index, torch.arange(count, device=index.device) // size)
    inputs = inputs[place]
    is_in_order = torch.equal(inputs, torch.arange(count, device=inputs.device))
    groups = ColumnGroups(
        count, size if is_regular else 1, None if is_regular else index.int(), None if is_in_order else inputs.int()
    )
    return groups, place, left.long()


@dataclass(frozen=True)
class QuantizedMatrix(ABC):
    """A matrix [out, in]. Fields are of three kinds: `groups`, tensors with one row for each output, and constants."""

    groups: ColumnGroups

    @property
    def out_features(self) -> int:
        return self._any_tensor().shape[0]

    @property
    def in_features(self) -> int:
        return self.groups.num_columns

    @property
    def device(self) -> torch.device:
        return self._any_tensor().device

    @property
    @abstractmethod
    def kind(self) -> str:
        """The scheme in a few words, for the log."""

    @abstractmethod
    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantized, [out, in] in the order of the stored columns: the definition of the scheme. Computed in
        float32, or in float64 if that is asked for, and rounded once."""

    @abstractmethod
    def _with_columns(self, places: torch.Tensor, groups: ColumnGroups, left: torch.Tensor) -> Self:
        """The stored columns `places` and the groups `left` alone."""

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantized, [out, in], columns in the order of the inputs."""
        values = self.values(dtype)
        if self.groups.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.groups.order.long(), values)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out], by torch: the definition that kernels are tested against."""
        if self.groups.order is not None:
            x = x.index_select(1, self.groups.order)
        step = max(1, NUMBERS_AT_ONCE // self.in_features)
        ends = range(0, self.out_features, step)
        return torch.cat([F.linear(x, self.rows(first, first + step).values(x.dtype)) for first in ends], dim=1)

    def rows(self, first: int, last: int) -> Self:
        """A view of outputs [first, last)."""
        return self._on_rows(lambda tensor: tensor[first:last])

    def take(self, index: torch.Tensor) -> Self:
        """These outputs, in this order."""
        return self._on_rows(lambda tensor: tensor[index.to(tensor.device)])

    def columns(self, first: int, last: int) -> Self:
        """Inputs [first, last), which become 0 onwards."""
        groups = self.groups
        if (first, last) == (0, groups.num_columns):
            return self
        if groups.index is None and groups.order is None and first % groups.size == last % groups.size == 0:
            places, left = torch.arange(first, last), torch.arange(first // groups.size, last // groups.size)
            kept = ColumnGroups.regular(last - first, groups.size)
            return self._with_columns(places.to(self.device), kept, left.to(self.device))
        inputs = torch.arange(groups.num_columns, device=self.device) if groups.order is None else groups.order
        if inputs.is_meta:
            places = torch.arange(first, last, device="meta")
        else:
            places = ((inputs >= first) & (inputs < last)).nonzero()[:, 0]
        kept, order, left = grouped_columns(groups.of_columns(self.device)[places], inputs[places] - first, groups.size)
        return self._with_columns(places[order], kept, left)

    @property
    def nbytes(self) -> int:
        held = [*self._row_tensors().values(), self.groups.index, self.groups.order]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def _any_tensor(self) -> torch.Tensor:
        return next(iter(self._row_tensors().values()))

    def _row_tensors(self) -> dict[str, torch.Tensor]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def _on_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self._row_tensors().items()}
        return replace(self, **changed)

    def can_stack(self, other: QuantizedMatrix) -> bool:
        """Whether both can be one matrix: the same scheme, and columns in the same groups and order."""
        if type(self) is not type(other) or not self.groups.is_same(other.groups):
            return False
        ours, theirs = self._row_tensors(), other._row_tensors()
        constants = (each.name for each in fields(self) if each.name != "groups" and each.name not in ours)
        return (
            {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in ours.items()}
            == {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in theirs.items()}
            and all(getattr(self, name) == getattr(other, name) for name in constants)
        )  # fmt: skip

    def stacked(self, others: Sequence[Self]) -> Self:
        """All of them above each other."""
        if not others:
            return self
        tensors = self._row_tensors()
        every = [tensors, *(other._row_tensors() for other in others)]
        joined: dict[str, Any] = {name: torch.cat([each[name] for each in every]) for name in tensors}
        return replace(self, **joined)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.is_meta or torch.equal(one, other)
