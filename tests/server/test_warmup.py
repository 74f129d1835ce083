"""What warm-up runs before anybody asks for it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.kernels.attention.configs import decode_config, scanned
from legato.pb import generate_pb2 as pb
from legato.server.memory.capacity import RequestedLimits
from legato.server.memory.warmup import SMALL_STEP, _ladder, decodes_beside_a_prompt, ordinary_steps
from legato.server.model import Model
from tests.server.shard import OPTIONS, load_model
from tests.tiny_models import tiny_llama


def requested(**request: int) -> RequestedLimits:
    return RequestedLimits(pb.WarmupRequest(**request), 4096, 16, 1024)


@pytest.mark.parametrize("max_rows", [1, 2, 7, 512])
@pytest.mark.parametrize("longest", [2, 100, 300, 4096])
def test_ordinary_steps_are_steps_that_a_router_may_send(max_rows: int, longest: int) -> None:
    asked = requested(max_rows=max_rows, max_total_tokens=longest, max_prefill_tokens=8192)
    known: set[int] = set()
    for step in (*ordinary_steps(asked), *decodes_beside_a_prompt(asked, 8)):
        known |= {admission.row for admission in step.admitted}
        assert sum(step.num_tokens) <= asked.step_tokens
        assert len(set(step.rows)) == len(step.rows) == len(step.num_tokens) == len(step.num_new_blocks)
        assert step.rows and set(step.rows) <= known and max(known) < max_rows
        assert sum(step.num_new_blocks) == len(step.new_blocks)


def test_ordinary_steps_have_prompts_from_the_largest_step_to_what_runs_as_graphs() -> None:
    asked = requested(max_prefill_tokens=8192)
    sizes = [sum(step.num_tokens) for step in ordinary_steps(asked) if max(step.num_tokens) > 1]
    assert max(sizes) == 8192
    assert all(2 * smaller > 0.9 * larger for larger, smaller in pairwise(sorted(sizes, reverse=True)))
    assert SMALL_STEP <= min(sizes) + 128 < 2 * SMALL_STEP


@given(st.integers(2, 512), st.sampled_from([1, 2, 4, 8, 16, 32]), st.data())
def test_any_number_of_decodes_beside_a_prompt_finds_its_attention_compiled(
    max_rows: int, num_kv_heads: int, data: st.DataObject
) -> None:
    """33 to 63 of them had not: 64 streams of an 8B model waited for the compiler for a second."""

    def variant(count: int) -> tuple[int, ...]:
        config = decode_config(count, num_kv_heads)
        return config.block_n, config.num_warps, config.num_stages, scanned(count), count == 1

    asked = requested(max_rows=max_rows, max_total_tokens=4096, max_prefill_tokens=8192)
    counts = [len(step.rows) - len(step.admitted) for step in decodes_beside_a_prompt(asked, num_kv_heads)]
    assert variant(data.draw(st.integers(1, max_rows - 1))) in map(variant, counts)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_warmup_runs_every_second_size_of_decodes(max_rows: int, num_rows: int) -> None:
    """Up to one and a half times as many rows."""
    sizes = _ladder(max_rows)
    assert sizes[0] == 1 and sizes[-1] == max_rows and sizes == sorted(set(sizes))
    assert any(num_rows <= size <= 1.5 * num_rows + 1 for size in sizes) or num_rows > max_rows


@pytest.mark.parametrize("max_rows", [1, 2, 32])
def test_ordinary_steps_run(tmp_path: Path, max_rows: int) -> None:
    model = Model(load_model(tiny_llama(tmp_path, max_position_embeddings=512)), OPTIONS)
    asked = requested(max_rows=max_rows, max_total_tokens=512, max_prefill_tokens=2048)
    decodes = [len(step.rows) for step in ordinary_steps(asked) if not step.admitted]
    assert decodes[-1] == max_rows or decodes == [1, 2, 1, 1]
    model._run_largest_steps(asked)
