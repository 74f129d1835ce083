"""The GPU's driver is initialised while torch is imported. Both take a second or so, and neither needs the other."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

LIBRARY = "libcuda.so.1"


def load_library() -> Any:
    return ctypes.CDLL(LIBRARY)


class DriverStart:
    """On a thread of its own, until `wait`. Where there is no driver nothing happens: torch finds that out, too."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ, load: Callable[[], Any] = load_library) -> None:
        # As torch does before it uses a GPU: kernels of libraries are loaded when they are first called.
        environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        self._load = load
        self._thread = threading.Thread(target=self._initialise, name="driver", daemon=True)
        self._thread.start()

    def _initialise(self) -> None:
        try:
            self._load().cuInit(0)
        except (OSError, AttributeError):
            return

    def wait(self) -> None:
        self._thread.join()
