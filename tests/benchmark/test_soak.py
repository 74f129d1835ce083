"""benchmarks/soak.py: what it finds, and what it lets pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.soak import MORE_DESCRIPTORS, Sample, problems

ROLES = ("launcher", "router", "shard", "worker")


def sample(minute: float, **changes: float) -> Sample:
    """`changes` are megabytes of some roles."""
    numbers = dict.fromkeys(ROLES, 20)
    memory = {role: 100.0 + changes.get(role, 0.0) for role in ROLES}
    return Sample(minute, int(minute * 1000), 300.0, 0.5, 1.0, 0.4, memory, numbers, numbers, numbers)


BEFORE, DRAINED = sample(0), replace(sample(60), kv_usage=0.0)


def test_a_server_that_stays_as_it_is_passes_although_it_warms_up_and_its_memory_varies() -> None:
    samples = [sample(minute, shard=min(minute, 10) * 5 + minute % 3, worker=minute / 20) for minute in range(1, 61)]
    assert problems(BEFORE, samples, DRAINED, []) == []


@pytest.mark.parametrize("role", ROLES)
def test_memory_that_grows_is_found(role: str) -> None:
    samples = [sample(minute, **{role: minute * 0.5}) for minute in range(1, 61)]
    (found,) = problems(BEFORE, samples, DRAINED, [])
    assert found == f"memory of {role} grew by 15.0 MB, more than 14.0"


def test_descriptors_blocks_wrong_answers_and_a_standstill_are_found() -> None:
    samples = [sample(minute) for minute in (1, 2, 2, 3)]
    more = {**BEFORE.descriptors, "worker": 21 + MORE_DESCRIPTORS}
    left = replace(DRAINED, descriptors=more, kv_usage=0.01)
    wrong = [{"client": "compares", "problem": "request 3: another text"}]
    assert [problem.split(":")[0] for problem in problems(BEFORE, samples, left, wrong)] == [
        "compares",
        "nothing was answered between two samples",
        f"{MORE_DESCRIPTORS + 1} descriptors more than before the load",
        "1.0% of the KV blocks are in use without requests",
    ]
