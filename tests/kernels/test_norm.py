from __future__ import annotations

import pytest
import torch

from legato.kernels import norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 96, 576])
def test_rms_norm_equals_torch(randn, assert_close, hidden, dtype):
    x, weight = randn(3, hidden, dtype=dtype), randn(hidden, dtype=dtype)
    assert_close(norm._norm_triton(x, weight, None, 1e-5, False), norm._rms_norm_torch(x, weight, 1e-5))


def test_rms_norm_reads_strided_rows(randn, assert_close):
    x, weight = randn(5, 64)[:, 3:51], randn(48)
    assert_close(norm._norm_triton(x, weight, None, 1e-5, False), norm._rms_norm_torch(x, weight, 1e-5))


def test_rms_norm_keeps_a_wider_weight(randn, assert_close):
    x, weight = randn(2, 40, dtype=torch.bfloat16), randn(40)
    assert_close(norm._norm_triton(x, weight, None, 1e-6, False), norm._rms_norm_torch(x, weight, 1e-6))


def test_rms_norm_of_no_rows_is_empty(randn):
    assert norm._norm_triton(randn(0, 8), randn(8), None, 1e-5, False).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inplace", [False, True])
def test_add_rms_norm_equals_torch(randn, assert_close, dtype, inplace):
    x, residual, weight = randn(3, 96, dtype=dtype), randn(3, 96, dtype=dtype), randn(96, dtype=dtype)
    expected_norm, expected_sum = norm._add_rms_norm_torch(x, residual.clone(), weight, 1e-5, inplace)
    actual_norm, actual_sum = norm._add_norm_triton(x, residual, weight, None, 1e-5, False, inplace)
    assert_close(actual_norm, expected_norm)
    assert_close(actual_sum, expected_sum)
    assert (actual_sum.data_ptr() == residual.data_ptr()) == inplace


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("num_parts", [2, 3])
def test_a_product_in_parts_is_added_up_first(randn, assert_close, num_parts, dtype, center):
    parts, residual, weight = randn(num_parts, 5, 96), randn(5, 96, dtype=dtype), randn(96, dtype=dtype)
    product = parts[0] + parts[1] + (parts[2] if num_parts == 3 else 0)
    expected = norm._add_norm_triton(product.to(dtype), residual.clone(), weight, None, 1e-5, center, True)
    actual = norm._add_norm_triton(parts, residual, weight, None, 1e-5, center, True)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs)  # not bit for bit: Triton's interpreter cuts bfloat16 off


def test_the_fused_norm_is_the_norm_of_the_sum_it_returns(randn):
    x, residual, weight = (randn(4, 64, dtype=torch.bfloat16) for _ in range(3))
    normed, total = norm._add_norm_triton(x, residual, weight[0], None, 1e-5, False, False)
    torch.testing.assert_close(normed, norm._norm_triton(total, weight[0], None, 1e-5, False), rtol=0, atol=0)


def test_the_public_functions_run_on_any_device(randn, assert_close):
    x, residual, weight = randn(2, 8), randn(2, 8), randn(8)
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(normed, norm.rms_norm(total, weight, 1e-5))


def test_a_weight_of_another_size_is_refused(randn):
    with pytest.raises(AssertionError):
        norm.rms_norm(randn(2, 8), randn(4), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 96, 4544])
@pytest.mark.parametrize("has", ["weight and bias", "weight", "neither"])
def test_layer_norm_equals_torch(randn, assert_close, hidden, dtype, has):
    x, weight, bias = randn(3, hidden, dtype=dtype) + 2, randn(hidden, dtype=dtype), randn(hidden, dtype=dtype)
    given = (weight if "weight" in has else None, bias if "bias" in has else None)
    expected = torch.nn.functional.layer_norm(
        x.double(), (hidden,), *(None if vector is None else vector.double() for vector in given), 1e-5
    )
    assert_close(norm._norm_triton(x, *given, 1e-5, True), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_layer_norm_is_the_norm_of_the_sum_it_returns(randn, assert_close, dtype):
    x, residual, weight, bias = (randn(3, 96, dtype=dtype) for _ in range(4))
    expected = residual + x
    normed, total = norm._add_norm_triton(x, residual, weight[0], bias[0], 1e-5, True, True)
    assert total.data_ptr() == residual.data_ptr()
    assert_close(total, expected)
    torch.testing.assert_close(normed, norm._norm_triton(total, weight[0], bias[0], 1e-5, True), rtol=0, atol=0)


def test_the_public_layer_norms_run_on_any_device(randn, assert_close):
    x, residual, weight, bias = randn(2, 8), randn(2, 8), randn(8), randn(8)
    normed, total = norm.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert_close(normed, norm.layer_norm(total, weight, bias, 1e-5))
