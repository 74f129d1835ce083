"""What warm-up runs before anybody asks for it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from legato.pb import generate_pb2 as pb
from legato.server.capacity import Wishes
from legato.server.model import Model
from legato.server.rehearsal import SMALL_STEP, ordinary_steps
from tests.server.shard import OPTIONS, load_model
from tests.tiny_models import tiny_llama


def wishes(**request: int) -> Wishes:
    return Wishes(pb.WarmupRequest(**request), 4096, 16, 1024)


@pytest.mark.parametrize("max_rows", [1, 2, 7, 512])
@pytest.mark.parametrize("longest", [2, 100, 4096])
def test_ordinary_steps_are_steps_that_a_router_may_send(max_rows: int, longest: int) -> None:
    asked = wishes(max_rows=max_rows, max_total_tokens=longest, max_prefill_tokens=8192)
    known: set[int] = set()
    for step in ordinary_steps(asked):
        known |= {admission.row for admission in step.admitted}
        assert sum(step.num_tokens) <= asked.step_tokens
        assert len(set(step.rows)) == len(step.rows) == len(step.num_tokens) == len(step.num_new_blocks)
        assert set(step.rows) <= known and max(known) < max_rows
        assert sum(step.num_new_blocks) == len(step.new_blocks)


def test_ordinary_steps_are_of_every_size_from_the_largest_to_what_runs_as_graphs() -> None:
    sizes = [sum(step.num_tokens) for step in ordinary_steps(wishes(max_prefill_tokens=8192))]
    assert sizes[0] == 8192 and sizes == sorted(sizes, reverse=True)
    assert all(2 * smaller > 0.9 * larger for larger, smaller in pairwise(sizes))
    assert SMALL_STEP <= sizes[-1] + 128 < 2 * SMALL_STEP


def test_ordinary_steps_run(tmp_path: Path) -> None:
    model = Model(load_model(tiny_llama(tmp_path)), OPTIONS)
    asked = wishes(max_rows=32, max_total_tokens=160, max_prefill_tokens=2048)
    assert len(list(ordinary_steps(asked))) == 4
    model._rehearse(asked)
