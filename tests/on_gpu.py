"""The tests of `make test-gpu`, all in one process: `python -m tests.on_gpu [--backwards] [pytest's options]`.

A result must not depend on what a process did before, so `make test-gpu` runs them in both orders of their files. Tests
that only compile for other cards (`make test-cards`) need no device and are left out.
"""

from __future__ import annotations

import os
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
    "lora/test_many.py",
)


def files() -> list[Path]:
    """In the order of the places, and by name in each folder."""
    found: list[Path] = []
    for place in PLACES:
        path = ROOT / place
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return found


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device")
    os.environ["LEGATO_TEST_DEVICE"] = "cuda"
    words = sys.argv[1:]
    chosen = files()
    if "--backwards" in words:
        words.remove("--backwards")
        chosen.reverse()
    return int(pytest.main(["-m", "not cards", *words, *map(str, chosen)]))


if __name__ == "__main__":
    sys.exit(main())
