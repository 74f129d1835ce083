from __future__ import annotations

import pytest
import torch

from legato.kernels import small_linear as linear
from legato.kernels.arrival import arrival_counters
from legato.kernels.small_linear import LinearConfig

VECTOR = LinearConfig(tile_rows=8, block_k=32, num_warps=4)
MATRIX = LinearConfig(tile_rows=16, block_k=32, num_warps=4, num_stages=2, use_dot=True)
SPLIT_VECTOR = LinearConfig(tile_rows=8, block_k=32, num_warps=4, split_k=3)
SPLIT_MATRIX = LinearConfig(tile_rows=16, block_k=32, num_warps=4, num_stages=2, split_k=3, use_dot=True)
CONFIGS = [VECTOR, MATRIX, SPLIT_VECTOR, SPLIT_MATRIX]


def check_against_torch(assert_close, x, weight, config, **extras):
    extras = dict(bias=None, norm_weight=None, eps=1e-5, activation=None, residual=None) | extras
    actual = linear._small_linear_triton(x, weight, **extras, config=config)
    assert_close(actual, linear._small_linear_torch(x, weight, **extras))


def scaled(weight):
    """So that results are about 1 and absolute tolerances mean something."""
    return weight / weight.shape[1] ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_equals_torch_in_every_dtype(randn, assert_close, config, dtype):
    rows = 3 if config.use_dot else 1
    check_against_torch(assert_close, randn(rows, 128, dtype=dtype), scaled(randn(40, 128, dtype=dtype)), config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 33), (41, 100), (24, 200)])
def test_equals_torch_for_odd_shapes(randn, assert_close, config, out_features, in_features):
    check_against_torch(assert_close, randn(1, in_features), scaled(randn(out_features, in_features)), config)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16])
def test_equals_torch_for_any_number_of_rows(randn, assert_close, rows):
    check_against_torch(assert_close, randn(rows, 64), scaled(randn(20, 64)), MATRIX)


@pytest.mark.parametrize("config", CONFIGS)
def test_everything_that_can_come_along(randn, assert_close, config):
    rows, inner = (2 if config.use_dot else 1), 21
    x, weight = randn(rows, 70), scaled(randn(2 * inner, 70))
    bias, norm_weight, residual = randn(2 * inner), randn(70), randn(rows, inner)
    check_against_torch(assert_close, x, weight, config, bias=bias)
    check_against_torch(assert_close, x, weight, config, norm_weight=norm_weight)
    check_against_torch(assert_close, x, weight, config, activation="silu")
    check_against_torch(
        assert_close,
        x,
        weight,
        config,
        bias=bias,
        norm_weight=norm_weight,
        activation="gelu_tanh",
        residual=residual,
    )


def test_strided_inputs(randn, assert_close):
    x, residual = randn(3, 80)[:, 8:72], randn(3, 30)[:, :20]
    check_against_torch(assert_close, x, scaled(randn(20, 64)), MATRIX, residual=residual)


def test_counters_are_zero_again_after_a_split(randn, device, assert_close):
    check_against_torch(assert_close, randn(1, 100), scaled(randn(30, 100)), SPLIT_VECTOR)
    assert not arrival_counters(device).any()


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("out_features", [64, 4096])
def test_the_chosen_configs_equal_torch(randn, assert_close, rows, out_features):
    config = linear.linear_config(rows, out_features, 256)
    check_against_torch(assert_close, randn(rows, 256), scaled(randn(40, 256)), config)


def test_more_rows_than_it_is_made_for_are_refused(randn):
    with pytest.raises(AssertionError):
        linear.small_linear(randn(17, 8), randn(4, 8))
