from __future__ import annotations

import pytest
import torch

from legato.kernels import rows as kernels
from legato.kernels.rows import RowTables

PADDING = 300


def make_tables(device, block_size=4):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 40, (PADDING + 1,), generator=generator).int()
    lengths[PADDING] = 0
    return RowTables(
        block_tables=torch.randint(0, 500, (PADDING + 1, 41 // block_size + 1), generator=generator).int().to(device),
        lengths=lengths.to(device),
        last_tokens=torch.randint(0, 1000, (PADDING + 1,), generator=generator).to(device),
        block_size=block_size,
        padding=PADDING,
    )


def some_rows(count, device, num_padded=0):
    generator = torch.Generator().manual_seed(count)
    rows = torch.randperm(PADDING, generator=generator)[:count]
    return torch.cat((rows, torch.full((num_padded,), PADDING))).int().to(device)


@pytest.mark.parametrize("count", [1, 3, 127, 128, 129, 300])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_gathers_what_torch_gathers(device, count, block_size):
    tables, rows = make_tables(device, block_size), some_rows(count, device, num_padded=2)
    actual, expected = kernels._gather_rows_triton(rows, tables), kernels._gather_rows_torch(rows, tables)
    for name in ("input_ids", "positions", "slots", "context_lens"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 128, 200])
def test_advances_the_rows_of_a_step_and_no_others(device, count):
    actual, expected = make_tables(device), make_tables(device)
    rows = some_rows(count, device)
    token_ids = torch.arange(count, device=device) + 7
    kernels._advance_rows_triton(rows, token_ids, actual)
    kernels._advance_rows_torch(rows, token_ids, expected)
    torch.testing.assert_close(actual.lengths, expected.lengths, rtol=0, atol=0)
    torch.testing.assert_close(actual.last_tokens, expected.last_tokens, rtol=0, atol=0)


def test_the_padding_row_stays_empty(device):
    tables = make_tables(device)
    rows = some_rows(5, device, num_padded=3)
    kernels._advance_rows_triton(rows, torch.zeros(8, dtype=torch.int64, device=device), tables)
    assert tables.lengths[PADDING] == 0
