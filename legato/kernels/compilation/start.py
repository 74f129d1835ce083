"""What of compilation can begin while a shard loads its weights."""

from __future__ import annotations

import threading
from contextlib import suppress

from legato.kernels.compilation.processes import CompileProcesses


class CompilerStart:
    """To be made before the process has threads and uses its GPU: it forks."""

    def __init__(self) -> None:
        self._processes = CompileProcesses.start()
        self._hashing = threading.Thread(target=_hash_compiler, name="compiler", daemon=True)
        self._hashing.start()

    def processes(self) -> CompileProcesses | None:
        """Waits until Triton can look up kernels. None: there are only threads."""
        self._hashing.join()
        return self._processes

    def close(self) -> None:
        """Everything is compiled. What comes later is compiled where it is launched."""
        if self._processes is not None:
            self._processes.close()
        self._processes = None


def _hash_compiler() -> None:
    """Half a second for 400 MB, which Triton wants before it looks up its first kernel. Python's lock is free."""
    with suppress(ImportError):  # of a Triton that has it elsewhere
        from triton.runtime.cache import triton_key

        triton_key()  # which remembers what it has returned
