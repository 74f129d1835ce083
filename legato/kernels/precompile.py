"""Compile kernels on several threads before the steps that need them.

Triton compiles a kernel when it is first launched, one after the other: half a minute for all variants of a model. Here
steps run without launching kernels; what they would launch is compiled meanwhile, most of it outside Python's lock. So
is the C function that launches it, for which Triton calls a C compiler: three more seconds if left to first launches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from legato.kernels.language import tl

MAX_THREADS = 16
# Kernels of this module are launched all the same: their results are indices, and torch would look up what is there.
LAUNCHED = "legato.kernels.rows"


def can_compile_ahead() -> bool:
    """Triton has had asynchronous compilation since 3.5."""
    if tl is None:
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode") and hasattr(triton.JITFunction, "run")


class _LoadingExecutor:
    """What Triton gives it to compile is also loaded."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._threads.submit(_compile_and_load, compile_kernel)


def _compile_and_load(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    with suppress(Exception):  # which its launch meets again, and reports
        kernel.run  # noqa: B018  a property that makes the launcher and loads the module
    return kernel


def _use_this_device() -> Callable[[], None]:
    """For other threads, whose current device is the first."""
    if not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, Triton kernels are not launched: their results stay unwritten. Leaving it waits for all compilations.

    A kernel that does not compile is left to its first launch, which reports it.
    """
    import triton

    run = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=warmup or kernel.fn.__module__ != LAUNCHED, **kwargs)

    num_threads = min(os.cpu_count() or 1, MAX_THREADS)
    with ThreadPoolExecutor(num_threads, "compile", initializer=_use_this_device()) as threads:
        triton.JITFunction.run = compile_only
        try:
            with triton.AsyncCompileMode(_LoadingExecutor(threads), ignore_errors=True):
                yield
        finally:
            triton.JITFunction.run = run
