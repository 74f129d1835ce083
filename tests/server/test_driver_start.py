"""The GPU's driver is initialised beside the import of torch, and its absence is nobody's error."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from legato.server.driver_start import DriverStart


def test_the_driver_is_initialised_once_on_another_thread():
    calls = []

    def initialise(flags: int) -> int:
        calls.append((flags, threading.current_thread() is threading.main_thread()))
        return 0

    environ: dict[str, str] = {}
    start = DriverStart(environ, lambda: SimpleNamespace(cuInit=initialise))
    start.wait()
    assert calls == [(0, False)]
    assert environ == {"CUDA_MODULE_LOADING": "LAZY"}
    assert "driver" not in [thread.name for thread in threading.enumerate()]


def test_a_variable_of_the_user_stays():
    environ = {"CUDA_MODULE_LOADING": "EAGER"}
    DriverStart(environ, lambda: SimpleNamespace(cuInit=lambda flags: 0)).wait()
    assert environ == {"CUDA_MODULE_LOADING": "EAGER"}


def test_a_machine_without_a_driver_starts_all_the_same():
    def missing() -> object:
        raise OSError("libcuda.so.1: cannot open shared object file")

    DriverStart({}, missing).wait()
    DriverStart({}, SimpleNamespace).wait()  # a library without the function
