"""Packed matrices: blocks of 16 interleaved rows in 4, 6 or 8 bits, multiplied without expanding them.

Activations are quantized to int8 by groups of 32 on the way; `quantized_rows` and `packed_product_torch` define that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from legato.cpu.library import BLOCK_ROWS, FORM_4, FORM_8, FORM_K4, FORM_K6, GROUP, Library, library


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some rows of a matrix in one form."""

    form: int
    num_rows: int
    in_features: int
    data: torch.Tensor  # uint8, whole blocks

    @property
    def bits(self) -> int:
        return self.form & 15


def pack_4(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> PackedRows:
    """codes [out, groups * 16] uint8, the low halves of a group before the high ones; scale and minimum [out, groups]
    float16: weight = scale * code + minimum."""
    return _packed(FORM_4, codes, scale.half(), minimum.half())


def pack_8(codes: torch.Tensor, scale: torch.Tensor) -> PackedRows:
    """codes [out, groups * 32] int8 from -127 on, scale [out, groups] float16."""
    return _packed(FORM_8, codes, scale.half())


def pack_k(
    codes: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
) -> PackedRows:
    """GGUF's K types with 4 bits, or without a minimum 6, as `KGroups` has them: codes as for `pack_4` or [out,
    groups * 32] uint8; scale and minimum [out, groups / 8] float16, integers [out, groups] int8."""
    return _packed(FORM_K6 if minimum is None else FORM_K4, codes, scale, minimum, first, second)


def _packed(
    form: int,
    codes: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    second: torch.Tensor | None = None,
) -> PackedRows:
    rows, groups = (scale if first is None else first).shape
    has_bytes, is_k = form in (FORM_8, FORM_K6), first is not None
    assert codes.shape == (rows, groups * GROUP // (1 if has_bytes else 2)), (codes.shape, rows, groups)
    assert scale.shape == (rows, groups // 8 if is_k else groups), (scale.shape, rows, groups)
    assert minimum is None or minimum.shape == scale.shape, (minimum.shape, scale.shape)
    data = _empty(form, rows, groups, codes.device)
    if not data.is_meta:
        parts = [None if part is None else part.contiguous() for part in (codes, scale, minimum, first, second)]
        addresses = [None if part is None else part.data_ptr() for part in parts]
        _loaded().pack(form, *addresses, rows, groups, data.data_ptr())
    return PackedRows(form, rows, groups * GROUP, data)


def pack_dense(matrix: torch.Tensor) -> PackedRows:
    """[out, in] of floats, rounded to 8 bits as `rounded_to_8_bits` does."""
    matrix = matrix.float().contiguous()
    rows, in_features = matrix.shape
    data = _empty(FORM_8, rows, -(-in_features // GROUP), matrix.device)
    if not data.is_meta:
        _loaded().pack_dense(matrix.data_ptr(), rows, in_features, data.data_ptr())
    return PackedRows(FORM_8, rows, in_features, data)


def can_stack(parts: Sequence[PackedRows]) -> bool:
    """Whether they can be one matrix: all but the last have whole blocks."""
    return all(part.num_rows % BLOCK_ROWS == 0 for part in parts[:-1])


class PackedMatrix:
    """A matrix [out, in], maybe with a bias, for the functions of the library. `address` is its struct."""

    def __init__(self, parts: Sequence[PackedRows], bias: torch.Tensor | None = None) -> None:
        assert can_stack(parts), [part.num_rows for part in parts]
        self._library = _loaded()
        self.parts = parts
        self.bias = None if bias is None else bias.float().contiguous()
        self.out_features = sum(part.num_rows for part in parts)
        self.in_features = parts[0].in_features
        groups = -(-self.in_features // GROUP)
        self.address: int = self._library.matrix(
            self.out_features, groups, None if self.bias is None else self.bias.data_ptr()
        )
        if not self.address:
            raise MemoryError
        first = 0
        for part in parts:
            assert part.in_features == self.in_features, (part.in_features, self.in_features)
            count = -(-part.num_rows // BLOCK_ROWS)
            self._library.matrix_blocks(self.address, first, count, part.form, part.data.data_ptr())
            first += count

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._library.matrix_free(self.address)

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    def apply(
        self, x: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 0.0, *, twice: bool = False
    ) -> torch.Tensor:
        """x [T, in] float32 -> [T, out]. With `norm` [in] RMSNorm comes first, where `in` is a multiple of 32. With
        `twice` activations are more exact: what the first rounding leaves of them is rounded and multiplied, too."""
        x = x.float().contiguous()
        assert x.shape[1] == self.in_features, (x.shape, self.in_features)
        out = torch.empty(x.shape[0], self.out_features)
        weight, shape = None if norm is None else norm.data_ptr(), x.shape
        if self._library.apply(self.address, x.data_ptr(), *shape, weight, eps, twice, out.data_ptr()):
            raise MemoryError
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [T] int64 as floats [T, in]: an embedding."""
        assert ids.dtype == torch.int64, ids.dtype
        out = torch.empty(len(ids), self.in_features)
        ids = ids.contiguous()
        if self._library.rows(self.address, ids.data_ptr(), len(ids), self.in_features, out.data_ptr()):
            raise IndexError(f"a token id is not less than {self.out_features}")
        return out


def quantized_rows(x: torch.Tensor, twice: bool = False) -> torch.Tensor:
    """x [T, in] as the products see it: int8 times the scale of 32 neighbours; with `twice` 256 times an int8 and
    another one for what is left, times a 256th of the scale."""
    grouped = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    most = grouped.abs().amax(2, keepdim=True)
    scale, factor = most * (1 / 127), torch.where(most > 0, 127 / most, torch.zeros_like(most))
    codes = (grouped * factor).round()
    if twice:
        codes += ((grouped - codes * scale) * (256 * factor)).round().clamp(-127, 127) / 256
    return (codes * scale).flatten(1)[:, : x.shape[1]]


def rounded_to_8_bits(matrix: torch.Tensor) -> torch.Tensor:
    """[out, in] as `pack_dense` stores it: int8 by groups of 32; scales are rounded up to half floats."""
    missing = -matrix.shape[1] % GROUP
    grouped = torch.nn.functional.pad(matrix.float(), (0, missing)).unflatten(1, (-1, GROUP))
    wanted = grouped.abs().amax(2) / 127
    scale = wanted.half()
    # The next half float, where this one is below.
    scale = torch.where(scale.float() < wanted, (scale.view(torch.int16) + 1).view(torch.float16), scale)
    wide = scale.float()[..., None]
    codes = (grouped / torch.where(wide > 0, wide, torch.ones_like(wide))).round().clamp(-127, 127)
    return (codes * wide).flatten(1)[:, : matrix.shape[1]]


def packed_product_torch(
    x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None = None, *, twice: bool = False
) -> torch.Tensor:
    """What `PackedMatrix.apply` computes, given the values of the matrix: the definition, in float64."""
    product = quantized_rows(x, twice).double() @ values.double().t()
    return (product if bias is None else product + bias).float()


def _loaded() -> Library:
    found = library()
    assert found is not None, "the CPU kernels are not built"
    return found


def _empty(form: int, rows: int, groups: int, device: torch.device) -> torch.Tensor:
    """Whole blocks, on a boundary of 64 bytes as torch allocates everything. On the meta device only their size."""
    data = torch.empty(-(-rows // BLOCK_ROWS) * _loaded().block_bytes(form, groups), dtype=torch.uint8, device=device)
    assert data.data_ptr() % 64 == 0, data.data_ptr()
    return data
