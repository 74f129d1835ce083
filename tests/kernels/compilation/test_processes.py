"""The process that forks others to compile: what it inherits, and when it ends."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from legato.kernels.compilation.processes import MAX_JOB_BYTES, CompileProcesses
from tests.kernels.test_compile import run_python

pytest.importorskip("triton")

# Ends without closing anything, as a shard that is killed.
KILLED = """
import os
from legato.kernels.compilation.processes import CompileProcesses

readable, writable = os.pipe()
processes = CompileProcesses.start()
os.close(writable)
assert os.read(readable, 1) == b"", "the forked process keeps files of the shard open"
print(processes._pid, flush=True)
os._exit(0)
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_it_keeps_no_files_of_the_shard_and_ends_with_it(tmp_path):
    pid = int(run_python("-c", KILLED, TRITON_CACHE_DIR=str(tmp_path)))
    deadline = time.monotonic() + 30.0
    while is_running(pid):
        assert time.monotonic() < deadline, "the forked process outlives the shard"
        time.sleep(0.05)


def test_a_process_with_threads_does_not_fork():
    stopped = threading.Event()
    thread = threading.Thread(target=stopped.wait)
    thread.start()
    try:
        assert CompileProcesses.start() is None
    finally:
        stopped.set()
        thread.join()


def test_when_nobody_answers_one_job_is_waited_for_and_no_other(monkeypatch):
    """The process has been stopped, perhaps: its socket takes a few jobs more, then a sender would wait for ever."""
    monkeypatch.setattr("legato.kernels.compilation.processes.LONGEST_SECONDS", 0.05)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork() or os._exit(0)
    processes = CompileProcesses(ours, child)
    problems: list[str | None] = []
    jobs = [b" " * MAX_JOB_BYTES] * 20
    sender = threading.Thread(target=lambda: problems.extend(map(processes.compile, jobs)), daemon=True)
    sender.start()
    sender.join(30.0)
    assert "TimeoutError" in str(problems[0]) and problems[1:] == ["the processes do not answer"] * 19
    theirs.close()
    processes.close()


def test_a_job_that_nobody_answers_is_said_to_have_failed():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork() or os._exit(0)
    processes = CompileProcesses(ours, child)
    theirs.close()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert "BrokenPipe" in str(processes.compile(b"{}"))
    assert "bytes" in str(processes.compile(b" " * (MAX_JOB_BYTES + 1)))
    processes.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)
