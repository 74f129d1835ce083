"""fp8 copies of 4-bit matrices: kept by all matrices or by none, and used by steps of many rows alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from legato.kernels.quantized import linear
from legato.layers import norm as norms
from legato.layers.norm import RMSNorm
from legato.quantization import fp8_copies
from legato.quantization.fp8_copies import keep_fp8_copies
from legato.quantization.on_load import QUANTIZERS
from legato.quantization.operands import operand_of
from legato.quantization.weight import QuantizedWeight

OUT, IN = 48, 256


@pytest.fixture(params=["int4", "bitsandbytes-nf4"])
def weights(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[QuantizedWeight]:
    """As on a GPU that multiplies fp8 and has room for ten such matrices."""
    monkeypatch.setattr(fp8_copies, "can_copy_to_fp8", lambda operand: operand.is_packed)
    monkeypatch.setattr(fp8_copies, "_free_memory", lambda device: 10 * OUT * IN)
    torch.manual_seed(0)
    made = [QuantizedWeight(QUANTIZERS[request.param](torch.randn(OUT, IN)), None) for _ in range(2)]
    for weight in made:
        weight.operand = operand_of(weight.matrix)
    return made


@pytest.mark.parametrize(("fraction", "kept"), [(0.0, False), (0.19, False), (0.2, True), (1.0, True)])
def test_all_or_none_are_kept(weights: list[QuantizedWeight], fraction: float, kept: bool) -> None:
    keep_fp8_copies(weights, fraction)
    assert [weight.fp8_copy is not None for weight in weights] == [kept, kept]


def test_steps_of_more_than_16_rows_use_them(weights: list[QuantizedWeight]) -> None:
    weight = weights[0]
    x = torch.randn(17, IN, dtype=torch.bfloat16)
    exact = weight.apply(x)
    keep_fp8_copies(weights, 1.0)
    assert torch.equal(weight.apply(x[:16]), exact[:16])
    rounded = weight.apply(x)
    assert not torch.equal(rounded, exact)
    distance = (rounded - exact).float().norm() / exact.float().norm()
    assert distance < 0.04, distance


def test_the_norm_before_a_product_with_a_copy_quantizes_its_rows(
    weights: list[QuantizedWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are made when the layers are there, which ask in each step."""
    asked: list[torch.dtype | None] = []

    def add(x: torch.Tensor, residual: torch.Tensor, *rest: object, row_type: torch.dtype | None, inplace: bool) -> Any:
        asked.append(row_type)
        return x, residual

    monkeypatch.setattr(norms, "add_rms_norm", add)
    monkeypatch.setattr(norms, "is_in_parts", lambda x, residual: True)  # as a GPU: the kernel's is asked
    norm = RMSNorm(torch.ones(IN), 1e-5)
    norm.reader = weights[0]
    before = weights[0].row_type
    for rows in (16, 17):
        norm.add(torch.ones(rows, IN), torch.ones(rows, IN))
    keep_fp8_copies(weights, 1.0)
    for rows in (16, 17):
        norm.add(torch.ones(rows, IN), torch.ones(rows, IN))
    assert asked == [None, before, None, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("method", "group_size", "sm", "copied"),
    [
        ("int4", 128, 90, True),
        ("bitsandbytes-nf4", 32, 90, True),
        ("bitsandbytes-nf4", 32, 86, False),
        ("int8", 256, 90, False),
    ],
)
def test_4_bit_matrices_are_copied_where_the_device_multiplies_fp8(
    monkeypatch: pytest.MonkeyPatch, method: str, group_size: int, sm: int, copied: bool
) -> None:
    monkeypatch.setattr(linear, "limits_of", lambda tensor: SimpleNamespace(sm=sm))
    monkeypatch.setattr(linear, "_suits_scaled_mm", lambda operand: True)
    operand = operand_of(QUANTIZERS[method](torch.randn(OUT, IN)))
    assert operand is not None and operand.group_size == group_size
    assert linear.can_copy_to_fp8(operand) == copied
