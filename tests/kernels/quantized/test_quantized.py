"""Products with quantized matrices against float64, at sizes that divide nothing."""

from __future__ import annotations

import pytest
import torch

from legato.kernels import activation as gates
from legato.kernels import norm as norms
from legato.kernels.arrival import arrival_counters
from legato.kernels.device import GpuLimits
from legato.kernels.quantized import eight_bit, linear, unpack
from legato.kernels.quantized.one_row import OneRowConfig, one_row_linear
from legato.kernels.quantized.tiled import TiledConfig, tiled_linear
from tests.kernels.quantized.operands import random_operand

FP8 = torch.float8_e4m3fn
ONE_ROW = OneRowConfig(tile_rows=4, num_words=64, num_warps=4)
TILED = TiledConfig(tile_rows=16, rows=16, num_warps=4, num_stages=2)
SPLIT = TiledConfig(tile_rows=16, rows=16, num_warps=4, num_stages=2, split_k=3)
# form, outputs, inputs, group size, zeros of groups
CASES = [
    ("int4", 21, 512, 128, True),
    ("int4", 21, 512, 128, False),
    ("int4", 9, 544, 32, True),
    ("int4", 9, 704, 64, False),
    ("int4", 9, 544, 32, "minimum"),
    ("int4", 9, 544, 16, "minimum"),
    ("int4", 9, 544, 16, False),
    ("int4", 8, 768, 256, True),
    ("int4", 7, 400, 400, True),
    ("table", 9, 576, 64, False),
    ("table", 9, 544, 32, False),
    ("table", 9, 512, 512, False),
    ("codes", 7, 400, 64, True),
    ("codes", 7, 416, 32, "minimum"),
    ("codes", 7, 400, 400, False),
    ("int8", 21, 272, 272, False),
    ("int8", 9, 400, 128, False),
    ("int8", 9, 416, 32, False),
    ("int8", 9, 400, 16, False),
    ("fp8", 21, 272, 272, False),
    ("fp8", 9, 400, 128, False),
]


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def operand(request, device):
    return random_operand(*request.param, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_row_equals_float64(randn, operand, dtype):
    x = randn(1, operand.in_features, dtype=dtype)
    actual = one_row_linear(x, operand, config=ONE_ROW)
    assert distance(actual, x.double() @ operand.values(torch.float64).T) < (6e-3 if dtype == torch.bfloat16 else 8e-4)


@pytest.mark.parametrize(("rows", "config", "dtype"), [(3, SPLIT, torch.bfloat16), (18, TILED, torch.float16)])
def test_rows_in_16_bits_equal_float64(randn, device, operand, rows, config, dtype):
    x = randn(rows, operand.in_features + 8, dtype=dtype)[:, : operand.in_features]
    actual = tiled_linear(x, operand, config)
    assert distance(actual, x.double() @ operand.values(torch.float64).T) < (8e-3 if dtype == torch.bfloat16 else 1e-3)
    assert not arrival_counters(device).any()


@pytest.mark.parametrize(("form", "dtype"), [("int4", FP8), ("fp8", FP8), ("int8", torch.int8)])
@pytest.mark.parametrize("groups", [512, 128, 64])
def test_rows_in_8_bits_equal_float64(randn, device, form, dtype, groups):
    """What is left is the rounding of the result: 8-bit numbers are multiplied exactly."""
    if form != "int4" and groups == 64:
        pytest.skip("only 4-bit integers come in so small groups")
    operand = random_operand(form, 21, 512, groups, zero=form == "int4", device=device)
    rows = eight_bit._quantize_rows_triton(randn(19, 512, dtype=torch.bfloat16), dtype)
    actual = tiled_linear(rows.numbers, operand, SPLIT, rows.scale, torch.bfloat16)
    assert distance(actual, rows.values(torch.float64) @ operand.values(torch.float64).T) < 5e-3


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_rows_are_quantized_as_torch_does(randn, dtype):
    x = randn(5, 70, dtype=torch.bfloat16)
    x[2] = 0
    actual, expected = eight_bit._quantize_rows_triton(x, dtype), eight_bit._quantize_rows_torch(x, dtype)
    assert torch.equal(actual.scale, expected.scale)
    assert distance(actual.values(torch.float32), expected.values(torch.float64)) < 1e-6
    assert distance(actual.values(torch.float32), x.double()) < (0.03 if dtype == FP8 else 0.01)


def test_prepared_rows_are_those_of_their_tensor_only(randn):
    x, other = randn(3, 16), randn(3, 16)
    rows = eight_bit.quantize_rows(x.cpu(), torch.int8)
    eight_bit.prepare_rows(x, rows)
    assert eight_bit.rows_of(x, torch.int8) is rows
    assert eight_bit.rows_of(other.cpu(), torch.int8) is not rows
    assert eight_bit.rows_of(x.cpu().clone(), FP8).numbers.dtype == FP8


@pytest.mark.parametrize(("form", "group", "zero"), [("int4", 64, True), ("int4", 128, False), ("table", 32, False)])
def test_unpacked_matrices_are_the_values(randn, device, form, group, zero):
    operand = random_operand(form, 37, 544, group, zero, device=device)
    expected = operand.values(torch.float64)
    assert distance(unpack._unpacked_triton(operand, torch.bfloat16, None), expected) < 5e-3
    rows = unpack.unpacked_rows(operand)
    assert rows.has_one_scale and distance(rows.values(torch.float32), expected) < 0.04
    scaled = unpack._unpacked_triton(operand, FP8, rows.scale)
    assert distance(scaled.float() * rows.scale, expected) < 0.04


@pytest.mark.parametrize(
    ("form", "group", "zero"),
    [("int4", 32, "minimum"), ("int4", 16, False), ("codes", 32, "minimum"), ("codes", 32, True), ("codes", 32, False),
     ("int8", 16, False), ("codes", 128, True), ("codes", None, False)],
)  # fmt: skip
@pytest.mark.parametrize("columns", [544, 400])
def test_weights_that_are_not_multiplied_in_8_bits_are_written_out_for_many_rows(device, form, group, zero, columns):
    operand = random_operand(form, 37, columns, group or columns, zero, device=device)
    assert linear.kernel_for(linear.MANY_ROWS, operand, GpuLimits(90, 232448)) == "unpacked"
    expected = operand.values(torch.float64)
    assert distance(unpack._unpacked_triton(operand, torch.bfloat16, None), expected) < 5e-3
    assert distance(unpack._unpacked_triton(operand, torch.float16, None), expected) < 5e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", [None, linear.Gate("silu")], ids=["plain", "gated"])
def test_many_rows_of_4_bits_have_the_type_of_x(randn, monkeypatch, dtype, gate):
    """torch's product of fp8 has bfloat16 results alone; the norm behind it adds them to states in float16."""

    def in_bfloat16(rows, operand):
        return (rows.values(torch.float64) @ operand.values(torch.float64).T).to(torch.bfloat16)

    monkeypatch.setattr(linear, "scaled_mm", in_bfloat16)
    operand, x = random_operand("int4", 32, 256, 128, True), randn(5, 256, dtype=dtype).cpu()
    actual = linear._unpacked_to_fp8(x, operand, torch.zeros(32, dtype=dtype), gate)
    product = x.double() @ operand.values(torch.float64).T
    assert actual.dtype == dtype
    assert distance(actual, product if gate is None else gate.apply(product)) < 0.06


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_small_groups_are_not_multiplied_in_8_bits(form):
    """A product of a number and its scale is no number of 8 bits."""
    for rows in (17, 511):
        assert linear.kernel_for(rows, random_operand(form, 32, 256, 32), GpuLimits(90, 232448)) == "16-bit"


@pytest.mark.parametrize("rows", [1, 5])
def test_gate_and_up_and_bias_in_one_kernel(randn, device, rows):
    operand = random_operand("int4", 20, 256, 128, True, device=device)
    x, bias = randn(rows, 256, dtype=torch.bfloat16), randn(20, dtype=torch.bfloat16)
    if rows == 1:
        product, gated = (one_row_linear(x, operand, bias, gate, ONE_ROW) for gate in (None, "silu"))
    else:
        product, gated = (tiled_linear(x, operand, TILED, bias=bias, activation=gate) for gate in (None, "silu"))
    expected = x.double() @ operand.values(torch.float64).T + bias.double()
    assert distance(product, expected) < 6e-3
    assert torch.equal(gated, gates._gate_and_mul_triton(product, "silu"))


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 200, 2048])
@pytest.mark.parametrize("form", ["int4", "table", "codes", "int8", "fp8"])
def test_the_definition_in_torch_is_used_without_a_gpu(form, rows):
    operand = random_operand(form, 24, 256, 128 if form in ("int4", "table") else 256)
    x = torch.randn(rows, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    torch.testing.assert_close(linear.quantized_linear(x, operand), x @ operand.values(torch.float64).T)


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 120])
@pytest.mark.parametrize("rows", [2, 16, 17, 64, 128, 4096])
def test_tiles_fit_the_device(sm, rows):
    limits = GpuLimits(sm, {75: 65536, 80: 166912, 90: 232448}.get(sm, 101376))
    for form, group_size in (("int4", 256), ("int4", 32), ("int8", 256)):
        operand = random_operand(form, 256, 256, group_size)
        config = linear.tiled_config(rows, operand, 2, limits)
        assert linear.shared_memory(config, operand, 2) <= limits.shared_memory


def test_the_estimate_covers_what_triton_allocated():
    """Bytes of compiled kernels for 8.6, 4-bit numbers in groups of 32."""
    operand = random_operand("int4", 1024, 4096, 32)
    for shape, allocated in (
        ((32, 8, 2, 5), 18496),
        ((32, 16, 2, 5), 26688),
        ((64, 32, 4, 4), 40064),
        ((64, 64, 4, 4), 64640),
    ):
        assert 2 * allocated > linear.shared_memory(linear.TiledConfig(*shape), operand, 2) >= allocated


def test_turing_multiplies_int8_in_16_bits():
    operand = random_operand("int8", 256, 256, 256)
    assert linear.kernel_for(64, operand, GpuLimits(75, 65536)) == "16-bit"
    assert linear.kernel_for(64, operand, GpuLimits(80, 166912)) == "int8"


def test_small_matrices_are_split_and_large_ones_are_not():
    limits = GpuLimits(90, 232448)
    small, large = (random_operand("int8", outputs, 2048, 2048) for outputs in (128, 4096))
    assert linear.tiled_config(4, small, 2, limits).split_k == 4
    assert linear.tiled_config(1024, large, 1, limits).split_k == 1


def test_fp8_units_are_used_where_the_device_has_them():
    operand = random_operand("int4", 32, 256, 128)
    assert linear.kernel_for(64, operand, GpuLimits(89, 101376)) == "fp8"
    assert linear.kernel_for(64, operand, GpuLimits(86, 101376)) == "16-bit"
    assert linear.kernel_for(64, random_operand("int8", 32, 256, 256), GpuLimits(80, 166912)) == "int8"


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_norms_and_gates_quantize_their_result_on_the_way(randn, dtype):
    x, residual, weight = (randn(*shape, dtype=torch.bfloat16) for shape in ((3, 70), (3, 70), (70,)))
    plain, _ = norms._add_norm_triton(x, residual.clone(), weight, None, 1e-5, False, True)
    normed, _ = norms._add_norm_triton(x, residual.clone(), weight, None, 1e-5, False, True, dtype)
    assert torch.equal(plain, normed)
    check_prepared(normed, dtype)
    gate_up = randn(3, 140, dtype=torch.bfloat16)
    gated = gates._gate_rows_triton(gate_up, "silu", dtype)
    assert torch.equal(gated, gates._gate_and_mul_triton(gate_up, "silu"))
    check_prepared(gated, dtype)


def check_prepared(result, dtype):
    (reference, rows), expected = eight_bit._prepared[0], eight_bit._quantize_rows_torch(result, dtype)
    assert reference() is result and eight_bit.rows_of(result, dtype) is rows
    assert torch.equal(rows.scale, expected.scale)
    assert torch.equal(rows.numbers.float(), expected.numbers.float())
