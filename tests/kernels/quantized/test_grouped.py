from __future__ import annotations

import pytest
import torch

from legato.kernels import grouped_linear as grouped
from legato.kernels.quantized.grouped import grouped_quantized_linear
from legato.kernels.quantized.tiled import TiledConfig
from tests.kernels.quantized.operands import random_operand

CONFIG = TiledConfig(tile_rows=16, rows=16, num_warps=4, num_stages=2)
ROUTES = {
    "one-token": (4, [[3, 1]]),
    "empty-experts": (5, [[4, 1], [1, 4], [4, 2], [1, 2]]),
    "several-tiles-and-a-rest": (3, [[0, 2]] * 19 + [[2, 1]] * 3),
}


@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_experts_equal_dense_ones_with_the_same_values(randn, device, routes, form):
    num_experts, ids = routes
    groups = grouped._group_rows_torch(torch.tensor(ids, device=device), num_experts)
    operand = random_operand(form, num_experts * 21, 256, 128, device=device)
    x, scale = randn(len(ids), 256, dtype=torch.bfloat16), randn(2 * len(ids))
    weight = operand.values(torch.float64).unflatten(0, (num_experts, -1))
    expected = grouped._grouped_linear_torch(x.double(), weight, groups, scale.double())
    actual = grouped_quantized_linear(x, operand, groups, scale, CONFIG)
    assert float((actual.double() - expected).norm() / expected.norm()) < 6e-3
