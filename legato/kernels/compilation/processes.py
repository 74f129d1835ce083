"""Processes that compile kernels. Most of a compilation holds Python's lock: on 16 threads of an H200's machine 28
seconds of it took 9.6.

A shard forks one process before it has threads and before it uses its GPU, when all kernels are imported. That process
forks another for each kernel, which compiles it into Triton's cache on disk and ends. So nothing is imported twice, and
no process but the shard ever calls CUDA. When the shard ends, however it does, the connection closes and they end, too.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import NoReturn

from legato.kernels.compilation.jobs import compile_job

logger = logging.getLogger(__name__)

# Far more than any kernel takes: the process has been stopped, or waits for something.
LONGEST_SECONDS = 60.0
MAX_JOB_BYTES = 1 << 16
DONE = b"\x00"


class CompileProcesses:
    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        connection.settimeout(LONGEST_SECONDS)  # jobs that nobody takes fill its buffer
        self._pid = pid
        self._lock = threading.Lock()
        self._is_open = True
        # A job was not answered in time: those that follow would not be either, and each would be waited for.
        self._is_silent = False

    @classmethod
    def start(cls) -> CompileProcesses | None:
        """None where a process cannot be forked, or should not because this one has threads."""
        if not hasattr(os, "fork") or not hasattr(socket, "send_fds") or threading.active_count() > 1:
            return None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            logger.warning("Kernels are compiled on threads: no process can be forked (%s)", error)
            return None
        if pid == 0:
            _serve(theirs)
        theirs.close()
        return cls(ours, pid)

    def compile(self, job: bytes) -> str | None:
        """Wait until the kernel is in Triton's cache. Returns what went wrong, or None. For any thread."""
        if len(job) > MAX_JOB_BYTES:
            return f"the job has {len(job)} bytes"
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                if self._is_silent:
                    return "the processes do not answer"
                socket.send_fds(self._connection, [job], [theirs.fileno()])
            ours.settimeout(LONGEST_SECONDS)
            answer = ours.recv(MAX_JOB_BYTES)
        except OSError as error:
            self._is_silent = self._is_silent or isinstance(error, TimeoutError)
            return f"{type(error).__name__}: {error}"
        finally:
            ours.close()
        return None if answer == DONE else answer.decode(errors="replace") or "the process ended"

    def close(self) -> None:
        """No kernel is being compiled any more."""
        if not self._is_open:
            return
        self._is_open = False
        self._connection.close()
        with suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)  # it may be busy, and nothing of it is needed
            os.waitpid(self._pid, 0)


def _serve(connection: socket.socket) -> NoReturn:
    """The forked process: one more for each job, until the connection closes."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the shard
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.disable()  # a collection would copy the memory that is shared with the shard
        _close_others(connection.fileno())
        _build_driver()
        _hash_compiler()
        while True:
            job, descriptors, _, _ = socket.recv_fds(connection, MAX_JOB_BYTES, 1)
            if not job:
                break
            _reap()
            _fork_for(job, descriptors[0], connection)
    finally:
        os._exit(0)


def _fork_for(job: bytes, answer: int, connection: socket.socket) -> None:
    try:
        if os.fork() == 0:
            connection.close()
            _answer(job, answer)
    except OSError as error:
        os.write(answer, f"no process can be forked: {error}".encode())
    os.close(answer)


def _answer(job: bytes, answer: int) -> NoReturn:
    """The process of one kernel. If it is killed, the end of `answer` says so."""
    try:
        compile_job(job)
        os.write(answer, DONE)
    except BaseException as error:
        os.write(answer, f"{type(error).__name__}: {error}".encode()[:MAX_JOB_BYTES])
    finally:
        os._exit(0)


def _reap() -> None:
    """Processes that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _close_others(kept: int) -> None:
    """The files of the shard: whoever reads its log waits for the last process that could write there. What fails
    here is told through the connection."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    most = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, kept)
    os.closerange(kept + 1, min(most, 1 << 20) if most > 0 else 1 << 16)


def _build_driver() -> None:
    """The module through which Triton reaches the driver, in a process that ends with it. Unless it is in the cache, a
    C compiler works on it for a second; the shard loads it from there."""
    if os.fork() == 0:
        try:
            from triton.backends.nvidia.driver import CudaUtils

            CudaUtils()
        finally:
            os._exit(0)


def _hash_compiler() -> None:
    """Half a second for the hash of the compiler, which is a part of every key of its cache: once, and not in each of
    the processes."""
    with suppress(ImportError):  # of a Triton that has it elsewhere
        from triton.runtime.cache import triton_key

        triton_key()
