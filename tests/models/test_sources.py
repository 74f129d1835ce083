"""The way of a tensor to its device, in pieces that are smaller than it."""

from __future__ import annotations

import pytest
import torch

from legato.models.sources import DIRECT_BYTES, Staging
from tests.server.local import DEVICE


@pytest.mark.parametrize("num_bytes", [64, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pieces_make_up_the_tensor(num_bytes: int, dtype: torch.dtype) -> None:
    staging = Staging(DEVICE, num_bytes)
    for shape in ((7, 31), (1,), (3, 5, 33)):  # one after the other through the same buffers
        tensor = torch.randn(shape).to(dtype)
        arrived = staging.staged(tensor)
        assert arrived.dtype == dtype and arrived.device.type == DEVICE.type
        assert torch.equal(arrived.cpu().view(torch.uint8), tensor.view(torch.uint8))


def test_columns_of_a_matrix_arrive_in_order() -> None:
    matrix = torch.arange(48.0).view(6, 8)
    assert torch.equal(Staging(DEVICE, 20).staged(matrix[:, 2:5]).cpu(), matrix[:, 2:5])


def test_on_a_cpu_a_mapped_tensor_is_not_copied() -> None:
    tensor = torch.zeros(2 * DIRECT_BYTES)
    assert Staging(torch.device("cpu")).copy(tensor).data_ptr() == tensor.data_ptr()
