"""How many threads compute, by affinity and by the limits of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from legato.common.options import RouterOptions
from legato.cpu.library import library
from legato.cpu.threads import usable_cores
from legato.router import cli as router
from legato.server import grammars

# Computes, forks, and computes in the child: more threads than cores, so that some hold a lock when it happens.
FORK = """
import os, torch
from legato.cpu.library import library
from legato.cpu.packed import PackedMatrix, pack_dense
torch.set_num_threads(1)
library().start_threads(64)
torch.manual_seed(0)
matrix, x = PackedMatrix([pack_dense(torch.randn(64, 64))]), torch.randn(3, 64)
expected = matrix.apply(x)
for _ in range(60):
    for _ in range(20):
        matrix.apply(x)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(matrix.apply(x), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
"""
# Forks while another thread computes; the child starts threads, as a process that loads a model does.
FORK_BESIDE = """
import os, threading, torch
from legato.cpu.library import library
from legato.cpu.packed import PackedMatrix, pack_dense
torch.set_num_threads(1)
library().start_threads(2)
matrix, x = PackedMatrix([pack_dense(torch.randn(512, 512))]), torch.randn(64, 512)
ends = threading.Event()
def compute():
    while not ends.is_set():
        matrix.apply(x)
other = threading.Thread(target=compute)
other.start()
for _ in range(40):
    child = os.fork()
    if not child:
        os._exit(0 if library().start_threads(2) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
ends.set()
other.join()
"""
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


@pytest.mark.parametrize(("cores", "half"), [(1, 1), (2, 1), (6, 3)])
def test_workers_and_threads_for_masks_are_half_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, half: int
) -> None:
    """Those of the container: a machine may have many more."""
    for module in (router, grammars):
        monkeypatch.setattr(module, "usable_cores", lambda: cores)
    assert router.num_workers(RouterOptions()) == grammars.mask_threads() == half


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("program", [FORK, FORK_BESIDE], ids=["alone", "beside a thread"])
def test_a_forked_process_computes_without_the_threads_of_its_parent(program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        try:
            assert process.wait(120) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
