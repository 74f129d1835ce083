"""Versions, platform and GPUs for bug reports: `--env` and `legato env`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata

from legato import __version__

PACKAGES = ("torch", "triton", "tokenizers", "safetensors", "huggingface_hub", "grpcio", "transformers")


def describe() -> str:
    """One fact per line."""
    return "\n".join(f"{name}: {fact}" for name, fact in facts().items())


def facts() -> dict[str, str]:
    """Reads package metadata only: importing torch takes seconds."""
    return {
        "legato": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpus": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "gpus": _gpus(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none (no nvidia-smi)"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return "; ".join(answer.strip().splitlines()) or "none"
