"""Experts in forms that no kernel knows, such as GPTQ with act-order, are multiplied one after the other."""

from __future__ import annotations

import torch

from legato.kernels.grouped_linear import Groups, _group_rows_torch
from legato.quantization.experts import QuantizedExperts, expert_weights
from legato.quantization.on_load import QUANTIZERS


def test_rows_that_no_kernel_has_grouped_are_not_looked_up() -> None:
    """While kernels are compiled ahead none runs. On a GPU an index out of bounds ends the process."""
    torch.manual_seed(0)
    experts = expert_weights([[QUANTIZERS["int8"](torch.randn(24, 64))] for _ in range(4)])
    assert isinstance(experts, QuantizedExperts) and experts.operand is None
    x, ids = torch.randn(3, 64), torch.tensor([[3, 1], [0, 3], [1, 2]])
    written = _group_rows_torch(ids, 4)
    unwritten = Groups(ids, torch.full_like(written.order, 1 << 30), written.starts.flip(0) + torch.arange(5).int() * 9)
    assert torch.equal(experts.apply(x, unwritten), experts.apply(x, written))
