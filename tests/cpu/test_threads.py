"""How many threads compute, by affinity and by the limits of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from legato.cpu.threads import usable_cores

AFFINITY = len(os.sched_getaffinity(0))


def groups(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = folder / "own"
    own.write_text("4:cpu,cpuacct:/system/unit\n0::/system/unit\n")
    return folder / "cgroup", own


def test_without_limits_the_affinity_mask_counts(tmp_path: Path) -> None:
    assert usable_cores(*groups(tmp_path, {"cpu.max": "max 100000"})) == AFFINITY


@pytest.mark.parametrize("where", ["cpu.max", "system/cpu.max", "system/unit/cpu.max"])
def test_a_quota_of_any_group_on_the_way_counts(tmp_path: Path, where: str) -> None:
    assert usable_cores(*groups(tmp_path, {where: "50000 100000"})) == 1


def test_a_part_of_a_core_is_rounded_up(tmp_path: Path) -> None:
    assert usable_cores(*groups(tmp_path, {"cpu.max": "150000 100000"})) == min(2, AFFINITY)


@pytest.mark.parametrize("where", ["cpu", "cpu/system", "cpu/system/unit"])
def test_old_hierarchies_have_limits_too(tmp_path: Path, where: str) -> None:
    files = {f"{where}/cpu.cfs_quota_us": "100000", f"{where}/cpu.cfs_period_us": "100000"}
    assert usable_cores(*groups(tmp_path, files)) == 1


def test_a_system_without_groups_has_no_limit(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path / "nobody") == AFFINITY
