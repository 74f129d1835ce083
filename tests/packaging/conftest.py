"""A model and an HTTP client for installations that are made and started outside the repository."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_llama

PATIENCE = 180.0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server does not answer")


def generate(port: int) -> dict[str, Any]:
    body = json.dumps({"inputs": "hello", "parameters": {"max_new_tokens": 5, "details": True}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body)
    with urllib.request.urlopen(request, timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def info(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/info", timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def end(process: subprocess.Popen[bytes]) -> int:
    """As `docker stop` does."""
    os.kill(process.pid, signal.SIGTERM)
    return process.wait(60)
