"""Programs that a benchmark starts and stops: other benchmarks, and servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from legato.common.sockets import free_port

HOST = "127.0.0.1"
START_SECONDS, STOP_SECONDS = 180.0, 20.0
# Of one benchmark: weights are made up on the device, so even the largest model is loaded within a minute or two.
LIMIT_SECONDS = 600.0
# Of a program that ends without an error message of its own.
SHOWN_LINES = 12


class BenchmarkFailed(Exception):
    """Something could not be measured; the message is the last output of the benchmark."""


def figures_of(words: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a Python program with `--json` writes. Its stderr is forwarded; its stdout has nothing that the file has
    not."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        child = subprocess.Popen(
            [sys.executable, *words, f"--json={file}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        )
        limit = threading.Timer(LIMIT_SECONDS, child.terminate)
        try:
            limit.start()
            said = _pass_on(child)
            code = child.wait()
        finally:
            is_late = limit.finished.is_set()
            limit.cancel()
            stop(child)
        if is_late:
            raise BenchmarkFailed(f"not done after {LIMIT_SECONDS:.0f} s")
        if code != 0:
            raise BenchmarkFailed(_last_words(said) or f"ended with code {code}")
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


def _pass_on(child: subprocess.Popen[str]) -> list[str]:
    """All lines of its stderr, after it has ended."""
    assert child.stderr is not None
    lines: list[str] = []
    for line in child.stderr:
        sys.stderr.write(line)
        sys.stderr.flush()
        lines.append(line.rstrip())
    return lines


def _last_words(lines: Sequence[str]) -> str:
    """The error message, which may quote lines of the shard, without the progress before it."""
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[starts[0] :] if starts else lines[-SHOWN_LINES:]).removeprefix("error: ")


def stop(child: subprocess.Popen[Any]) -> None:
    """Terminate, and kill what does not end in time."""
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def leave_nothing_behind() -> None:
    """From now on SIGTERM runs every `finally` before it ends this program."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def serving(
    port: int, words: Sequence[str], path: str = "/health", source: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server while the block runs, from when it answers to GET `path`. If it does not start, its log is the error.
    `source` is another checkout to run."""
    environment = None if source is None else {**os.environ, "PYTHONPATH": str(source)}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, cwd=source, env=environment)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(f"http://{HOST}:{port}{path}"):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    sys.exit(f"the server did not start:\n{log.read().decode(errors='replace')[-3000:]}")
                time.sleep(0.1)
            yield server
        finally:
            stop(server)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def launched(*words: str, source: Path | None = None) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A `text-generation-launcher` with these arguments: its port and its process."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        place = (f"--hostname={HOST}", f"--port={port}", f"--shard-uds-path={folder}/shard")
        command = [sys.executable, "-m", "legato.launcher.cli", *place, *words]
        with serving(port, command, source=source) as launcher:
            yield port, launcher
