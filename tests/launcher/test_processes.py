"""Children: what they say, how they end, and what they leave behind."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from legato.launcher.processes import KEPT_LINES, Child, ChildFailed, ProcessCommand, Supervisor
from legato.launcher.supervision import first_cause
from tests.stopwatch import Stopwatch

T = TypeVar("T")
PR_SET_CHILD_SUBREAPER = 36


def supervised(body: Callable[[Supervisor], Awaitable[T]]) -> T:
    async def run() -> T:
        with Supervisor() as supervisor:
            return await body(supervisor)

    return asyncio.run(asyncio.wait_for(run(), 60))


def ended(code: str) -> Child:
    """A child that ran this Python code to its end."""

    async def body(supervisor: Supervisor) -> Child:
        child = supervisor.start(python(code))
        assert await supervisor.first_exit(child) is child
        return child

    return supervised(body)


def python(code: str, name: str = "child") -> ProcessCommand:
    return ProcessCommand(name, [sys.executable, "-c", code], dict(os.environ))


def test_the_end_of_a_child_that_did_not_listen_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel then resets the connection on which it was told how far the start has come."""

    async def body(supervisor: Supervisor) -> None:
        deaf = [supervisor.start(replace(python("import time; time.sleep(600)"), beats=True)) for _ in range(5)]
        for child in deaf:
            child.tell("loading", 0.5)
            child.kill()
        await asyncio.wait([child.exited for child in deaf], timeout=50)
        assert [child.describe_exit()[:27] for child in deaf] == ["child was killed by SIGKILL"] * 5

    supervised(body)
    assert "Exception in callback" not in caplog.text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", "child exited with code 0"),
        ("import sys; sys.exit(3)", "child exited with code 3"),
        ("import sys; sys.exit('error: no such file')", "child exited with code 1: no such file"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "child was killed by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), 9)", "child was killed by SIGKILL, perhaps because memory ran out"),
        ("import os; os.kill(os.getpid(), 40)", "child was killed by signal 40"),
    ],
)
def test_an_exit_is_described(code: str, expected: str) -> None:
    assert ended(code).describe_exit() == expected


def test_the_killed_one_of_several_exited_children_is_reported() -> None:
    """Shards that lose another end as well, perhaps before we look."""

    async def body(supervisor: Supervisor) -> tuple[Child, Child]:
        mourner = supervisor.start(python("raise SystemExit(1)", "shard-0"))
        killed = supervisor.start(python("import os; os.kill(os.getpid(), 9)", "shard-1"))
        await asyncio.wait([mourner.exited, killed.exited])
        return first_cause([mourner, killed]), killed

    named, killed = supervised(body)
    assert named is killed


def test_only_the_end_of_stderr_is_kept() -> None:
    child = ended(f"import sys; [print(i, file=sys.stderr) for i in range({KEPT_LINES + 100})]")
    assert list(child.stderr) == [str(i) for i in range(100, KEPT_LINES + 100)]


def test_all_output_before_the_exit_is_relayed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ended("import sys; sys.stdout.write(''.join(f'line {i}\\n' for i in range(20000)) + 'no newline')")
    assert caplog.messages == [*(f"line {i}" for i in range(20000)), "no newline"]


def test_very_long_lines_and_invalid_utf8_are_relayed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ended("import sys; sys.stdout.buffer.write(b'x' * 3_000_000 + b'\\xff\\nlast\\n')")
    assert "".join(caplog.messages[:-1]) == "x" * 3_000_000 + "\ufffd"
    assert caplog.messages[-1] == "last"


def test_a_grandchild_with_an_open_pipe_is_killed_without_delay() -> None:
    stopwatch = Stopwatch()
    child = ended(
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " stdout=1); sys.stderr.write(f'{p.pid}\\nlast words')"
    )
    assert stopwatch.seconds < 5
    grandchild = int(child.stderr[0])
    assert child.describe_exit() == "child exited with code 0: last words"
    deadline = time.monotonic() + 30
    while is_running(grandchild):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_lines(path: Path, count: int) -> None:
    while not path.exists() or len(path.read_text().splitlines()) < count:
        await asyncio.sleep(0.01)


def test_the_first_process_of_a_container_leaves_no_zombies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A router that dies leaves HTTP workers, which end a moment later and are nobody's children then."""
    names = tmp_path / "orphan"
    code = f"""
import os, subprocess
orphan = subprocess.Popen(["sleep", "0.1"], process_group=0)
open({str(names)!r}, "w").write(str(orphan.pid))
os._exit(3)
"""
    become_subreaper = ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert become_subreaper == 0
    monkeypatch.setattr("legato.launcher.processes.os.getpid", lambda: 1)
    monkeypatch.setattr("legato.launcher.processes.die_with", lambda parent: None)

    async def body(supervisor: Supervisor) -> Child:
        child = supervisor.start(python(code))
        await child.exited
        orphan = int(names.read_text())
        while psutil.pid_exists(orphan):
            await asyncio.sleep(0.01)
        return child

    try:
        assert supervised(body).describe_exit() == "child exited with code 3"
    finally:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_a_stubborn_child_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"""
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(ready)!r}, "w").write("deaf\\n")
time.sleep(600)
"""

    async def body(supervisor: Supervisor) -> int:
        child = supervisor.start(python(code))
        await until_lines(ready, 1)
        await supervisor.stop(child, grace=0.1)
        return await child.exited

    assert supervised(body) == -9


def test_children_are_stopped_in_parallel(tmp_path: Path) -> None:
    ready, asked = tmp_path / "ready", tmp_path / "asked"
    # Each leaves only when it sees that the others have been asked as well.
    code = f"""
import signal, sys, time
def stop(*_):
    open({str(asked)!r}, "a").write("asked\\n")
    while len(open({str(asked)!r}).readlines()) < 3:
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open({str(ready)!r}, "a").write("ready\\n")
time.sleep(600)
"""

    async def body(supervisor: Supervisor) -> list[int]:
        children = [supervisor.start(python(code)) for _ in range(3)]
        await until_lines(ready, 3)
        await supervisor.stop(*children, grace=50)
        return [await child.exited for child in children]

    assert supervised(body) == [0, 0, 0]


def test_children_do_not_outlive_an_error() -> None:
    seen: list[int] = []

    async def body(supervisor: Supervisor) -> None:
        child = supervisor.start(python("import time; time.sleep(600)"))
        seen.append(child._process.pid)
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        supervised(body)
    os.waitpid(seen[0], 0)


def test_a_missing_program_is_reported() -> None:
    async def body(supervisor: Supervisor) -> None:
        supervisor.start(ProcessCommand("router", ["/no/such/program"], {}))

    with pytest.raises(ChildFailed, match="/no/such/program"):
        supervised(body)
