from __future__ import annotations

import pytest
import torch

from legato.kernels import grouped_linear as grouped
from legato.kernels.grouped_linear import GroupedConfig, Groups

SINGLE = GroupedConfig(block_m=1, block_n=8, block_k=32, num_warps=4, num_stages=1)
MATRIX = GroupedConfig(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
# num_experts, then for each token the experts it goes to
ROUTES = {
    "one-token": (8, [[6, 2]]),
    "one-token-one-expert": (1, [[0]]),
    "empty-experts": (7, [[5, 1], [1, 5], [5, 2], [1, 2]]),
    "all-to-one": (5, [[3]] * 37),
    "all-to-the-last": (3, [[2]] * 16),
    "several-tiles-and-a-rest": (3, [[0, 2]] * 33 + [[2, 1]] * 3),
    "as-many-experts-as-rows": (6, [[0, 1], [2, 3], [4, 5]]),
}


@pytest.fixture(params=ROUTES)
def routes(request, device) -> tuple[torch.Tensor, int]:
    num_experts, ids = ROUTES[request.param]
    return torch.tensor(ids, device=device), num_experts


def check_against_torch(assert_close, x, weight, groups: Groups, scale=None, config=MATRIX):
    actual = grouped._grouped_linear_triton(x, weight, groups, scale, config)
    assert_close(actual, grouped._grouped_linear_torch(x, weight, groups, scale))


def scaled(weight):
    """So that results are about 1 and absolute tolerances mean something."""
    return weight / weight.shape[2] ** 0.5


def test_rows_are_grouped_as_torch_sorts_them(routes):
    ids, num_experts = routes
    actual, expected = grouped._group_rows_triton(ids, num_experts), grouped._group_rows_torch(ids, num_experts)
    assert actual.order.tolist() == expected.order.tolist()
    assert actual.starts.tolist() == expected.starts.tolist()


def test_more_rows_than_a_program_sees_at_once_are_grouped(device, monkeypatch):
    monkeypatch.setattr(grouped, "GROUPING_BLOCK", 16)
    ids = torch.arange(50, device=device).view(25, 2) * 7 % 5
    actual, expected = grouped._group_rows_triton(ids, 5), grouped._group_rows_torch(ids, 5)
    assert actual.order.tolist() == expected.order.tolist()
    assert actual.starts.tolist() == expected.starts.tolist()


def test_the_definition_is_a_product_for_each_row(randn):
    ids = torch.tensor([[2, 0], [3, 2]])
    x, weight, scale = randn(2, 5).cpu(), randn(4, 3, 5).cpu(), randn(4).cpu()
    expected = [scale[row] * (weight[ids[row // 2, row % 2]] @ x[row // 2]) for row in range(4)]
    actual = grouped.grouped_linear(x, weight, grouped.group_rows(ids, 4), scale)
    torch.testing.assert_close(actual, torch.stack(expected))


@pytest.mark.parametrize("is_shared", [True, False], ids=["a-row-for-each-token", "a-row-for-each-expert"])
def test_equals_torch_however_rows_are_spread(randn, assert_close, routes, is_shared):
    ids, num_experts = routes
    groups = grouped._group_rows_torch(ids, num_experts)
    x = randn(ids.shape[0] if is_shared else ids.numel(), 64)
    weight, scale = scaled(randn(num_experts, 40, 64)), randn(ids.numel())
    check_against_torch(assert_close, x, weight, groups)
    check_against_torch(assert_close, x, weight, groups, scale)
    if ids.shape[0] == 1:
        check_against_torch(assert_close, x, weight, groups, scale, SINGLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [SINGLE, MATRIX])
def test_equals_torch_in_every_dtype(randn, device, assert_close, config, dtype):
    groups = grouped._group_rows_torch(torch.tensor([[2, 0, 3]], device=device), 4)
    x, weight = randn(1, 128, dtype=dtype), scaled(randn(4, 40, 128, dtype=dtype))
    check_against_torch(assert_close, x, weight, groups, randn(3), config)


@pytest.mark.parametrize("config", [SINGLE, MATRIX])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 33), (41, 100)])
def test_equals_torch_for_odd_shapes(randn, device, assert_close, config, out_features, in_features):
    groups = grouped._group_rows_torch(torch.tensor([[2, 0]], device=device), 3)
    check_against_torch(
        assert_close, randn(2, in_features), scaled(randn(3, out_features, in_features)), groups, None, config
    )


def test_strided_inputs(randn, device, assert_close):
    groups = grouped._group_rows_torch(torch.tensor([[1], [0], [1]], device=device), 2)
    check_against_torch(assert_close, randn(3, 80)[:, 8:72], scaled(randn(2, 20, 64)), groups)


@pytest.mark.parametrize("tokens", [1, 3, 40, 60, 150])
def test_the_chosen_configs_equal_torch(randn, device, assert_close, tokens):
    groups = grouped._group_rows_torch(torch.tensor([[0, 2]] * tokens, device=device), 3)
    x, weight = randn(tokens, 256, dtype=torch.bfloat16), scaled(randn(3, 40, 256, dtype=torch.bfloat16))
    check_against_torch(assert_close, x, weight, groups, None, None)


def test_experts_without_rows_do_not_count(randn, device, assert_close):
    groups = grouped._group_rows_torch(torch.tensor([[2, 0], [0, 2]], device=device), 4)
    weight = scaled(randn(4, 40, 64))
    weight[1] = weight[3] = float("nan")
    check_against_torch(assert_close, randn(2, 64), weight, groups)


def test_no_tokens_have_no_rows(randn, device):
    groups = grouped._group_rows_torch(torch.empty(0, 2, dtype=torch.int64, device=device), 3)
    assert groups.starts.tolist() == [0, 0, 0, 0]
    assert grouped._grouped_linear_triton(randn(0, 8), randn(3, 4, 8), groups, None).shape == (0, 4)


def test_two_tokens_are_too_many_for_the_config_of_one(randn, device):
    groups = grouped._group_rows_torch(torch.tensor([[0], [0]], device=device), 2)
    with pytest.raises(AssertionError):
        grouped._grouped_linear_triton(randn(2, 8), randn(2, 4, 8), groups, None, SINGLE)
