"""The tests of `make test-gpu`, all in one process: `python -m tests.on_gpu [--backwards] [pytest's options]`.

A result must not depend on what a process did before, so `make test-gpu` runs them in both orders of their files. Tests
that only compile for other cards (`make test-cards`) need no device and are left out.

Nearly all of the time is compilation: one process on an H200's machine was through a fifth of the tests after seven
minutes. So `--fill-cache` first runs a part of them in each of many processes, whose results count for nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent
PLACES = (
    "kernels",
    "sampling",
    "server/test_same_tokens.py",
    "server/graphs/test_mixed.py",
    "server/test_no_waiting_on_gpu.py",
    "server/test_needle.py",
    "server/test_encoder_decoder.py",
    "server/test_kv_cache_dtype.py",
    "server/test_disable_custom_kernels.py",
    "models/test_bf16_on_gpu.py",
    "models/test_states.py",
    "lora/test_many.py",
)


def files() -> list[Path]:
    """In the order of the places, and by name in each folder."""
    found: list[Path] = []
    for place in PLACES:
        path = ROOT / place
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return found


class Part:
    """A plugin of pytest: every `count`th test, from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self._first :: self._count]


def num_processes() -> int:
    """As many as there are cores, of 4 GB of the device each."""
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(os.cpu_count() or 1, free // (4 << 30)))


def fill_cache() -> None:
    """Compile what the tests need, into Triton's cache."""
    count = num_processes()
    words = [[sys.executable, "-m", "tests.on_gpu", f"--part={first}/{count}"] for first in range(count)]
    running = [subprocess.Popen(each, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for each in words]
    for process in running:
        process.wait()


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device")
    os.environ["LEGATO_TEST_DEVICE"] = "cuda"
    words, plugins = sys.argv[1:], []
    if "--fill-cache" in words:
        words.remove("--fill-cache")
        fill_cache()
    if words and words[0].startswith("--part="):
        first, count = map(int, words.pop(0).removeprefix("--part=").split("/"))
        plugins.append(Part(first, count))
    chosen = files()
    if "--backwards" in words:
        words.remove("--backwards")
        chosen.reverse()
    return int(pytest.main(["-m", "not cards", *words, *map(str, chosen)], plugins))


if __name__ == "__main__":
    sys.exit(main())
