"""What of compilation can begin while a shard loads its weights."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from legato.kernels.compilation.processes import CompileProcesses


class CompilerStart:
    """To be made before the process has threads and uses its GPU: it forks."""

    def __init__(self) -> None:
        self._processes = CompileProcesses.start()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="compiler")
        # What fails here fails again where it is needed, and is reported there.
        self._begun: list[Future[None]] = [self._threads.submit(each) for each in (_hash_compiler, _make_driver)]

    def processes(self) -> CompileProcesses | None:
        """Waits until Triton is ready to compile. None: there are only threads."""
        self._threads.shutdown()
        return self._processes

    def close(self) -> None:
        """Everything is compiled. What comes later is compiled where it is launched."""
        self._threads.shutdown()
        if self._processes is not None:
            self._processes.close()
        self._processes = None


def _hash_compiler() -> None:
    """Half a second for 400 MB, which Triton wants before it looks up its first kernel. Python's lock is free."""
    from triton.runtime.cache import triton_key

    key: Callable[[], str] = triton_key  # which remembers what it has returned
    key()


def _make_driver() -> None:
    """Triton has a C compiler build a module for it, unless that is in its cache."""
    from triton.runtime import driver

    driver.active  # noqa: B018  made when it is asked for
