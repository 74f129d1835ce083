"""Compile kernels on several threads before the steps that need them.

Triton compiles a kernel when it is first launched, one after the other: half a minute for all variants of a model. Here
steps run without launching kernels; what they would launch is compiled meanwhile, most of it outside Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, Triton kernels are not launched: their results stay unwritten. Leaving it waits for all compilations.

    A kernel that does not compile is left to its first launch, which reports it.
    """
    import triton

    run = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=warmup or kernel.fn.__module__ != LAUNCHED, **kwargs)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS), thread_name_prefix="compile") as executor:
        triton.JITFunction.run = compile_only
        try:
            with triton.AsyncCompileMode(executor, ignore_errors=True):
                yield
        finally:
            triton.JITFunction.run = run
