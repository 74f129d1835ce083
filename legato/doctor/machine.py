"""Checks of Python, memory, disks, ports and limits of the machine or container."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from legato.common.errors import LegatoError
from legato.doctor.findings import Finding, ok, problem, warning
from legato.launcher.endpoints import check_port
from legato.modelfiles.cache import cache_folder

GIB = 2**30
OLDEST_PYTHON = (3, 11)
# A connection is a descriptor, and workers, scheduler and shards have some of their own.
FEW_FILES = 4096
# NCCL exchanges data between shards through shared memory.
LEAST_SHARED = GIB
LEAST_MEMORY, LEAST_DISK = 4 * GIB, 10 * GIB
CGROUP_LIMIT, CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def look_at_python() -> Iterator[Finding]:
    found = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield problem("python", found, "install CPython 3.11 or newer")
    elif platform.system() != "Linux":
        yield warning("python", found, "Legato is tested on Linux; use a container or a virtual machine")
    else:
        yield ok("python", found)


def look_at_packages(package: str = "legato") -> Iterator[Finding]:
    """Installed versions against what the package asks for."""
    from packaging.requirements import Requirement  # huggingface_hub brings it along

    wrong = []
    requirements = [Requirement(line) for line in metadata.requires(package) or ()]
    needed = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    for item in needed:
        try:
            version = metadata.version(item.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{item.name} is not installed")
            continue
        if not item.specifier.contains(version, prereleases=True):
            wrong.append(f"{item.name} is {version}, needed is {item.specifier}")
    if wrong:
        yield problem("packages", "; ".join(wrong), f"{sys.executable} -m pip install --upgrade {package}")
    else:
        yield ok("packages", f"{len(needed)} dependencies as needed")


def available_memory() -> int:
    """Bytes that this process could get: of the machine, or of its container, whichever is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        return min(free, int(CGROUP_LIMIT.read_text()) - int(CGROUP_USED.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def look_at_memory(num_gpus: int) -> Iterator[Finding]:
    free = available_memory()
    found = f"{free / GIB:.1f} GiB available"
    if free < LEAST_MEMORY:
        yield warning("memory", found, "give the container more memory; a model needs its weights and a KV cache")
    else:
        yield ok("memory", found)
    shared = Path("/dev/shm")
    if num_gpus > 1 and shared.is_dir() and shutil.disk_usage(shared).total < LEAST_SHARED:
        size = shutil.disk_usage(shared).total / 2**20
        yield problem("shared memory", f"/dev/shm has {size:.0f} MiB", "start the container with `--shm-size 1g`")


def look_at_disks() -> Iterator[Finding]:
    """Where models are stored. Folders that do not exist yet are made in the nearest one that does."""
    from huggingface_hub import constants

    for subject, folder, variable in (
        ("Hub cache", Path(constants.HF_HUB_CACHE), "HF_HOME"),
        ("package cache", cache_folder(None), "LEGATO_CACHE"),
    ):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        found = f"{folder}: {free / GIB:.1f} GiB free"
        if not os.access(existing, os.W_OK):
            yield warning(subject, f"{folder} cannot be written to", f"set {variable} to another folder")
        elif free < LEAST_DISK:
            yield warning(subject, found, f"make room, or set {variable} to a folder on a larger disk")
        else:
            yield ok(subject, found)
    try:
        with tempfile.TemporaryFile():
            pass
    except OSError as error:
        yield problem("temporary files", f"cannot be made ({error.strerror})", "set TMPDIR to a folder to write to")


def look_at_ports(address: str, ports: dict[str, int]) -> Iterator[Finding]:
    """`ports` by the flag that sets them."""
    for flag, port in ports.items():
        try:
            check_port(address, port)
        except LegatoError as error:
            yield problem(f"port {port}", str(error), f"stop the other program, or start with {flag} N")
        else:
            yield ok(f"port {port}", f"free on {address}")


def look_at_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files"
    if 0 <= soft < FEW_FILES:
        way = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
        yield warning("limits", f"{found}: a connection takes one", f"{way}, or `--ulimit nofile=65536` of docker run")
    else:
        yield ok("limits", found)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if 0 <= processes < 512:
        yield warning("limits", f"{processes} processes and threads", "ulimit -u 4096")
