from __future__ import annotations

import pytest
import torch

from legato.kernels.attention import chunk
from legato.kernels.attention.hopper import hopper_attention, suits
from legato.kernels.paged_kv import Scoring, ragged_attention_torch
from tests.kernels.paged_case import paged_case

QUERIES, CONTEXTS = [130, 64, 3, 1], [130, 900, 515, 7]


@pytest.fixture
def hopper() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Gluon has no interpreter: this kernel runs on Hopper GPUs only")
    return torch.device("cuda")


def check_against_torch(hopper, assert_close, queries=QUERIES, contexts=CONTEXTS, **shape):
    """Everything in the cache that is no key or value is NaN, the rest of the last page included."""
    case = paged_case(hopper, queries, contexts, **({"heads": 8, "kv_heads": 2, "dtype": torch.bfloat16} | shape))
    scoring = Scoring(scale=case.q.shape[2] ** -0.5)
    out = torch.full(case.q.shape, 7.0, dtype=case.q.dtype, device=hopper)
    hopper_attention(case.q, case.kv, case.cu_seqlens_q, scoring, out)
    assert_close(out, ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, scoring))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_equals_torch_in_every_dtype_and_head_dim(hopper, assert_close, dtype, head_dim):
    check_against_torch(hopper, assert_close, dtype=dtype, head_dim=head_dim)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (7, 1), (8, 1), (71, 1), (128, 1)])
def test_equals_torch_for_any_group(hopper, assert_close, heads, kv_heads):
    check_against_torch(hopper, assert_close, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_equals_torch_for_any_block_size(hopper, assert_close, block_size):
    check_against_torch(hopper, assert_close, block_size=block_size, with_rows=True)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 384, 1000])
def test_equals_torch_at_every_border(hopper, assert_close, context):
    check_against_torch(hopper, assert_close, [min(context, 40), context], [context, context], head_dim=128)


def test_hundreds_of_sequences_find_their_tiles(hopper, assert_close):
    queries = [i % 3 for i in range(140)]
    check_against_torch(hopper, assert_close, queries, [4 + i % 5 for i in range(140)])


def test_a_sequence_without_a_context_and_what_is_behind_the_last_stay_as_they_are(hopper, assert_close):
    case = paged_case(hopper, [3, 5, 1, 0], [0, 9, 21, 0], dtype=torch.bfloat16, with_rows=True)
    q = torch.cat((case.q, case.q[:6]))
    out = torch.full_like(q, 7.0)
    hopper_attention(q, case.kv, case.cu_seqlens_q, Scoring(0.125), out)
    expected = ragged_attention_torch(case.q, case.kv, case.cu_seqlens_q, Scoring(0.125))
    assert_close(out[3:9], expected[3:9])
    assert (out[:3] == 7).all() and (out[9:] == 7).all()


def test_long_chunks_go_there(hopper, monkeypatch):
    asked = []
    monkeypatch.setattr(chunk, "hopper_attention", lambda *arguments: asked.append(arguments))
    case = paged_case(hopper, [100], [200], dtype=torch.bfloat16)
    chunk.chunk_attention(case.q, case.kv, case.cu_seqlens_q, Scoring(0.125))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("scoring", "shape"),
    [
        (Scoring(0.1, window=100), {}),
        (Scoring(0.1, soft_cap=30.0), {}),
        (Scoring(0.1, torch.ones(4)), {}),
        (Scoring(0.1), {"dtype": torch.float32}),
        (Scoring(0.1), {"cache_dtype": torch.float8_e5m2}),
        (Scoring(0.1), {"head_dim": 80}),
        (Scoring(0.1), {"block_size": 1}),
    ],
)
def test_what_it_cannot_do_goes_elsewhere(scoring, shape):
    queries = [40]
    case = paged_case(torch.device("cpu"), queries, [50], **({"dtype": torch.bfloat16} | shape))
    assert not suits(case.q, case.kv, scoring)


def test_few_rows_go_elsewhere():
    case = paged_case(torch.device("cpu"), [4] * 8, [50] * 8, dtype=torch.bfloat16)
    assert not suits(case.q, case.kv, Scoring(0.1))
