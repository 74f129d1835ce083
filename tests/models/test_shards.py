"""The processes that tests divide models among: a shard that fails does not spoil what comes behind it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from legato.layers.shard import Shard
from tests.models import shards as module
from tests.models.shards import ShardProcesses


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardProcesses]:
    with ShardProcesses() as started:
        started.call(ranked, "first", world_size=2)
        monkeypatch.setattr(module, "SECONDS", 2)
        yield started


def ranked(word: str, shard: Shard) -> str:
    return f"{word} {shard.rank}"


def late(shard: Shard) -> str:
    time.sleep(5 * shard.rank)
    return "late"


def given_up(shard: Shard) -> None:
    """Rank 1 waits for a sum that rank 0 does not make."""
    if shard.rank == 0:
        raise ValueError("no matrix")
    shard.all_reduce(torch.ones(1))


def test_a_late_answer_is_not_taken_for_the_next(processes: ShardProcesses) -> None:
    with pytest.raises(AssertionError, match="shard 1: silent"):
        processes.call(late, world_size=2)
    assert processes.call(ranked, "second", world_size=2) == ["second 0", "second 1"]


def test_a_shard_that_waits_for_another_is_replaced(processes: ShardProcesses) -> None:
    with pytest.raises(AssertionError, match=r"no matrix[\s\S]*shard 1: silent"):
        processes.call(given_up, world_size=2)
    assert processes.call(ranked, "second", world_size=2) == ["second 0", "second 1"]
