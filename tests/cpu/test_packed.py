"""Packed products against their definition in torch, on awkward shapes, with every instruction set."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from legato.cpu.library import GROUP, Library
from legato.cpu.packed import (
    PackedMatrix,
    PackedRows,
    pack_4,
    pack_8,
    pack_dense,
    pack_k,
    packed_product_torch,
    rounded_to_8_bits,
)
from legato.quantization.affine import KGroups
from legato.quantization.matrix import ColumnGroups

Same = Callable[[Callable[[], torch.Tensor]], None]
SHAPES = [(16, 32), (1, 32), (17, 64), (48, 96), (100, 576), (31, 1536)]
K_SHAPES = [(16, 256), (1, 256), (100, 512), (31, 1536)]


def four_bits(rows: int, columns: int) -> tuple[PackedRows, torch.Tensor]:
    """Random 4-bit weights, packed and as floats."""
    codes = torch.randint(0, 16, (rows, columns // GROUP, GROUP), dtype=torch.uint8)
    scale = (torch.rand(rows, columns // GROUP) * 0.1).half()
    minimum = (torch.rand(rows, columns // GROUP) - 0.9).half()
    halves = codes[..., :16] | codes[..., 16:] << 4
    values = codes.float() * scale.float()[..., None] + minimum.float()[..., None]
    return pack_4(halves.flatten(1), scale, minimum), values.flatten(1)


def eight_bits(rows: int, columns: int) -> tuple[PackedRows, torch.Tensor]:
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    scale = (torch.rand(rows, columns // GROUP) * 0.01).half()
    values = codes.float() * scale.float().repeat_interleave(GROUP, 1)
    return pack_8(codes, scale), values


def k_blocks(rows: int, columns: int, bits: int) -> tuple[PackedRows, torch.Tensor]:
    """Random weights as GGUF's Q4_K and Q6_K have them."""
    first, second = torch.randint(0, 64, (2, rows, columns // GROUP), dtype=torch.int8)
    scale = (torch.rand(rows, columns // 256) * 0.01).half()
    minimum = (-torch.rand(rows, columns // 256) * 0.1).half() if bits == 4 else None
    if bits == 6:
        first, second = 2 * first - 63, 63 - 2 * second
    codes = torch.randint(0, 1 << bits, (rows, columns // GROUP, GROUP), dtype=torch.uint8)
    stored = codes[..., :16] | codes[..., 16:] << 4 if bits == 4 else codes
    columns_of = ColumnGroups.regular(columns, 256)
    matrix = KGroups(columns_of, bits, scale, minimum, first, second, stored.flatten(1))
    return pack_k(matrix.codes, scale, minimum, first, second), matrix.values(torch.float32)


def four_bits_of_k(rows: int, columns: int) -> tuple[PackedRows, torch.Tensor]:
    return k_blocks(rows, columns, 4)


def six_bits_of_k(rows: int, columns: int) -> tuple[PackedRows, torch.Tensor]:
    return k_blocks(rows, columns, 6)


def without_ties(x: torch.Tensor) -> torch.Tensor:
    """With zeros in place of what is half between two codes: it may be rounded either way."""
    grouped = x.unflatten(1, (-1, GROUP))
    codes = grouped * (127 / grouped.abs().amax(2, keepdim=True))
    return torch.where((codes.abs() % 1 - 0.5).abs() < 1e-4, 0, grouped).flatten(1)


MADE = [(make, shape) for make in (four_bits, eight_bits) for shape in SHAPES]
MADE += [(make, shape) for make in (four_bits_of_k, six_bits_of_k) for shape in K_SHAPES]


@pytest.mark.parametrize(("make", "shape"), MADE)
def test_products_are_those_of_the_definition(kernels: Library, make, shape) -> None:
    torch.manual_seed(0)
    packed, values = make(*shape)
    bias = torch.randn(shape[0])
    matrix = PackedMatrix([packed], bias)
    for rows in (1, 2, 3, 7, 16, 67):
        x = without_ties(torch.randn(rows, shape[1]) * torch.logspace(-3, 2, rows)[:, None])
        for twice in (False, True):
            expected = packed_product_torch(x, values, bias, twice=twice)
            # Relative to what is summed: sums are in float32, and a second rounding may go the other way.
            bound = (1e-4 if twice else 2e-6) * (x.abs() @ values.abs().t()) + 1e-5
            assert ((matrix.apply(x, twice=twice) - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", [*SHAPES, (80, 300), (40, 512)])
def test_instruction_sets_have_the_same_products(same_with_all: Same, shape: tuple[int, int]) -> None:
    compare_products(same_with_all, shape)


def compare_products(same: Same, shape: tuple[int, int]) -> None:
    """Of every number of rows that leaves something over, with all forms in one matrix and a pair of blocks."""
    torch.manual_seed(0)
    outputs, inputs = shape
    whole = -(-inputs // GROUP) * GROUP
    parts = [four_bits(48, whole)[0], eight_bits(outputs, whole)[0]]
    if inputs % 256 == 0:
        parts = [four_bits_of_k(48, inputs)[0], six_bits_of_k(48, inputs)[0], *parts]
    if inputs % GROUP:
        parts = [pack_dense(torch.randn(outputs, inputs))]
    matrix = PackedMatrix(parts, torch.randn(sum(part.num_rows for part in parts)))
    x = torch.randn(200, inputs) * torch.logspace(-3, 2, 200)[:, None]
    x[5] = 0
    for rows in (*range(1, 41), 72, 96, 97, 109, 200):
        for twice in (False, True):
            same(lambda rows=rows, twice=twice: matrix.apply(x[:rows], twice=twice))


def test_a_row_has_the_same_sums_in_every_batch(kernels: Library) -> None:
    torch.manual_seed(0)
    makers = (four_bits, four_bits_of_k, six_bits_of_k, eight_bits)
    matrix = PackedMatrix([make(rows, 512)[0] for make, rows in zip(makers, (64, 48, 64, 40), strict=True)])
    x = torch.randn(200, 512)
    together = matrix.apply(x)
    for first, last in ((0, 1), (5, 7), (100, 103), (11, 27), (64, 200)):
        assert torch.equal(matrix.apply(x[first:last]), together[first:last])


def test_dense_weights_are_rounded_to_8_bits(kernels: Library) -> None:
    torch.manual_seed(0)
    dense = torch.randn(37, 100) * torch.logspace(-6, 3, 37)[:, None]
    dense[3] = 0
    rows = PackedMatrix([pack_dense(dense)]).rows(torch.arange(37))
    expected = rounded_to_8_bits(dense)
    # A code may round either way where it is half between two.
    step = dense.abs().amax(1, keepdim=True) / 127
    assert ((rows - expected).abs() <= step * 1.01).all()
    assert ((rows - expected).abs() > step * 0.01).float().mean() < 0.01
    assert ((rows - dense).abs() <= step * 0.51 + 6e-8 * 127).all()


def test_rows_come_back_as_they_were_packed(kernels: Library) -> None:
    torch.manual_seed(0)
    made = [four_bits(32, 256), four_bits_of_k(32, 256), six_bits_of_k(32, 256), eight_bits(5, 256)]
    ids = torch.tensor([100, 0, 31, 32, 7, 7, 63, 64, 95, 96])
    rows = PackedMatrix([packed for packed, _ in made]).rows(ids)
    torch.testing.assert_close(rows, torch.cat([values for _, values in made])[ids], rtol=1e-6, atol=1e-6)


def test_a_norm_comes_before_the_product(kernels: Library) -> None:
    torch.manual_seed(0)
    packed, values = four_bits(48, 576)
    x, norm = torch.randn(5, 576) * 3, torch.rand(576)
    expected = packed_product_torch(torch.nn.functional.rms_norm(x, (576,), norm, 1e-5), values)
    torch.testing.assert_close(PackedMatrix([packed]).apply(x, norm, 1e-5), expected, rtol=1e-3, atol=1e-1)


def test_what_is_not_finite_stays_visible(kernels: Library) -> None:
    matrix = PackedMatrix([four_bits(32, 64)[0]])
    for broken in (float("nan"), float("inf"), -float("inf")):
        x = torch.randn(2, 64)
        x[1, 40] = broken
        out = matrix.apply(x)
        assert out[0].isfinite().all() and not out[1].isfinite().any()


def test_of_no_rows_there_are_no_products(kernels: Library) -> None:
    matrix = PackedMatrix([four_bits(48, 64)[0]])
    for _ in range(2):  # the second finds the buffers of a step that had rows
        assert matrix.apply(torch.empty(0, 64)).shape == (0, 48)
        assert matrix.apply(torch.randn(3, 64)).shape == (3, 48)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_stays_visible(kernels: Library, broken: float) -> None:
    dense = torch.randn(20, 64)
    dense[3, 40] = broken
    matrix = PackedMatrix([pack_dense(dense)])
    row = torch.tensor([3])
    assert not matrix.rows(row)[0, 32:].isfinite().any()  # looked up as an embedding
    out = matrix.apply(torch.randn(2, 64))
    assert out[:, row].isnan().all() and out[:, :3].isfinite().all()
