"""Every head size, dtype and number of query heads for a key head, with the tiles that the device gets."""

from __future__ import annotations

import pytest
import torch

from legato.kernels.attention import chunk, decode
from legato.kernels.attention.hopper import suits
from legato.kernels.paged_kv import Scoring, ragged_attention_torch
from tests.kernels.paged_case import PagedCase, paged_case

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Query and key heads.
HEADS = ((4, 4), (8, 2), (12, 1), (71, 1))
ALL = [(head_dim, heads, dtype) for head_dim in HEAD_DIMS for heads in HEADS for dtype in DTYPES]
# The interpreter is slow.
SOME = [(80, (8, 2), torch.float32), (192, (4, 4), torch.bfloat16), (64, (71, 1), torch.float16)]
CASES = ALL if torch.cuda.is_available() else SOME


def case_of(device: torch.device, head_dim: int, heads: tuple[int, int], dtype: torch.dtype, queries: list[int]):
    contexts = [140, 33, 1][: len(queries)]
    return paged_case(device, queries, contexts, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, dtype=dtype)


def expected(case: PagedCase, scoring: Scoring) -> torch.Tensor:
    return ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, scoring)


@pytest.mark.parametrize(("head_dim", "heads", "dtype"), CASES)
def test_chunks(device, assert_close, head_dim, heads, dtype):
    case = case_of(device, head_dim, heads, dtype, [70, 3, 1] if device.type == "cuda" else [20])
    scoring = Scoring(head_dim**-0.5)
    found = chunk._chunk_attention_triton(case.q, case.kv, case.cu_seqlens_q, scoring)
    assert_close(found, expected(case, scoring))
    if device.type == "cuda" and suits(case.q, case.kv, scoring):
        found = chunk._hopper_attention(case.q, case.kv, case.cu_seqlens_q, scoring)
        assert_close(found, expected(case, scoring))


@pytest.mark.parametrize(("head_dim", "heads", "dtype"), CASES)
def test_decodes(device, assert_close, head_dim, heads, dtype):
    case = case_of(device, head_dim, heads, dtype, [1, 1, 1])
    scoring = Scoring(head_dim**-0.5)
    assert_close(decode._decode_attention_triton(case.q, case.kv, scoring), expected(case, scoring))
