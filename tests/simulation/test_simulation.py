"""A few seeds, and that a seed is all it takes to see a failure again. `make sim` has a thousand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from legato.scheduling.blocks import BlockPool
from tests.simulation.__main__ import run_seeds
from tests.simulation.world import SimulationFailed, simulate

SEEDS = 12


def test_every_seed_keeps_the_promises() -> None:
    reports = [simulate(seed) for seed in range(SEEDS)]
    assert sum(report.num_steps for report in reports) > SEEDS * 200
    assert sum(report.num_restarts for report in reports) > 0
    assert sum(report.num_preemptions for report in reports) > 0
    assert sum(report.num_drafts for report in reports) > SEEDS * 10
    assert sum(report.num_copied_back for report in reports) > SEEDS


def test_a_seed_is_the_same_in_every_process() -> None:
    """Even if strings have other hashes there."""
    digests = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.simulation", "--seed", "3"]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


def test_a_failure_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "free", lambda self, blocks: None)
    with pytest.raises(SimulationFailed) as failure:
        simulate(3)
    text = str(failure.value)
    assert "seed 3 failed: AssertionError" in text and "blocks are lost" in text
    assert text.endswith("replay it: python -m tests.simulation --seed 3 --trace")
    with pytest.raises(SimulationFailed) as again:
        simulate(3)
    assert str(again.value) == text


def test_make_sim_fails_if_a_seed_does(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_seeds(range(3, 5), jobs=1) == 0
    assert "2 seeds, 0 failed" in capfd.readouterr().out
    monkeypatch.setattr(BlockPool, "free", lambda self, blocks: None)
    assert run_seeds(range(3, 5), jobs=1) == 1
    output = capfd.readouterr()
    assert "2 seeds, 2 failed" in output.out
    assert "replay it: python -m tests.simulation --seed 4 --trace" in output.err
