"""benchmarks/seeds.py, memory.py and served_perplexity.py: what they make of what a server answered."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from benchmarks import memory, seeds, served_perplexity
from benchmarks.memory import MemorySample, tables
from benchmarks.mixed_load import Reply
from legato.benchmark.cpu.models import CpuModel


def test_every_seeded_prompt_is_another_and_the_same_in_every_run() -> None:
    first, second = (seeds.prompts(20, 48) for _ in range(2))
    assert first == second
    assert len({each.text for each in first}) == len({each.seed for each in first}) == 20
    assert {24 <= each.new_tokens <= 48 for each in first} == {True}


def test_a_text_that_differs_is_reported_with_where_it_does() -> None:
    alone = [Reply(("the same",)), Reply(("begins alike, ends so",)), Reply(("short",))]
    crowded = [Reply(("the same",)), Reply(("begins alike, ends otherwise",)), Reply(("short and more",))]
    found = seeds.differences(alone, crowded)
    assert [(each["prompt"], each["common_characters"]) for each in found] == [(1, 19), (2, 5)]


def test_memory_is_told_by_role_and_by_what_pages_belong_to() -> None:
    sample = memory.take("now", os.getpid(), with_maps=True)
    assert sample.roles["launcher"] > 10**6 and sample.total >= sample.roles["launcher"]
    assert sum(memory.maps(os.getpid()).values()) > 10**6
    samples = [MemorySample("ready", {"shard": 10**6}, {}), MemorySample("idle", {"shard": 2 * 10**6}, {"heap": 5})]
    assert [cell.strip() for cell in tables(samples).splitlines()[3].split("|")[1:-1]] == ["total", "1.0", "2.0"]


def test_perplexity_is_that_of_the_mean_loss() -> None:
    assert served_perplexity.perplexity([math.log(2.0), math.log(8.0)]) == pytest.approx(4.0)


def test_sequences_cover_the_tokens_of_the_text(tmp_path: Path) -> None:
    model = CpuModel("tiny", tmp_path)
    sequences = served_perplexity.sequences_of(model, 50, 20, "abc " * 100)
    assert [len(each) for each in sequences] == [20, 20, 10]
