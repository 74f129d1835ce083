"""Compile kernels before the steps that need them, many at a time.

Triton compiles a kernel when it is first launched, one after the other: half a minute for all variants of a model. Here
steps run without launching kernels; what they would launch is compiled meanwhile, in processes of its own where there
are some (`processes.py`), else on threads. Threads also load what was compiled, and build the C function that launches
it, for which Triton calls a C compiler: three more seconds if left to first launches.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from legato.kernels.compilation.jobs import encode, is_cached, uses_cache
from legato.kernels.compilation.processes import CompileProcesses
from legato.kernels.language import is_interpreted, tl

logger = logging.getLogger(__name__)

MAX_THREADS = 16
# Kernels of this module are launched all the same: their results are indices, and torch would look up what is there.
LAUNCHED = "legato.kernels.rows"


def can_compile_ahead() -> bool:
    """Triton has had asynchronous compilation since 3.5."""
    if tl is None or is_interpreted():
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode") and hasattr(triton.JITFunction, "run")


@dataclass
class CompiledKernels:
    """How many there were, for a log line."""

    found: int = 0  # in Triton's cache
    in_processes: int = 0
    on_threads: int = 0


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


class _Compiler:
    """Stands in for the `compile` of each kernel: where it is not in the cache, has a process put it there first. What
    no process has compiled is compiled here, and what is wrong with it is raised here."""

    def __init__(self, processes: CompileProcesses | None) -> None:
        self.counts = CompiledKernels()
        self._processes = processes if uses_cache() else None
        self._replaced: dict[Any, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def replace(self, kernel: Any, device: int) -> None:
        """Before a kernel is compiled for the first time. Triton sets its compiler with what it keeps for a device."""
        if kernel not in self._replaced:
            kernel.device_caches[device]
            original = kernel.compile
            self._replaced[kernel] = original
            kernel.compile = lambda src, **how: self._compile(original, src, **how)

    def restore(self) -> None:
        for kernel, original in self._replaced.items():
            kernel.compile = original

    def _compile(self, original: Callable[..., Any], src: Any, **how: Any) -> Any:
        place = "found"
        if not is_cached(src, how["target"], how["options"], how.get("_env_vars")):
            place = "in_processes" if self._compiled_elsewhere(src, how["target"], how["options"]) else "on_threads"
        compiled = original(src, **how)
        with self._lock:
            setattr(self.counts, place, getattr(self.counts, place) + 1)
        return compiled

    def _compiled_elsewhere(self, src: Any, target: Any, options: dict[str, Any]) -> bool:
        job = None if self._processes is None else encode(src, target, options)
        if self._processes is None or job is None:
            return False
        problem = self._processes.compile(job)
        if problem is not None:
            logger.warning("No process compiled %s, a thread does (%s)", src.name, problem.partition("\n")[0])
        return problem is None


@contextmanager
def _submitted_once(jit_function: Any) -> Iterator[None]:
    """Triton compiles what it is given once, but makes the key for it, with several hashes, at every launch until the
    compilation is over: here 32 times for the layers of a model, in all steps. So what was submitted is what later
    launches find. What has not compiled is forgotten at the end."""
    do_compile = jit_function._do_compile
    submitted: list[tuple[dict[Any, Any], Any]] = []

    def remember(kernel: Any, key: Any, signature: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        found = do_compile(kernel, key, signature, device, *args, **kwargs)
        if found is not None:
            kernels = kernel.device_caches[device][0]
            kernels.setdefault(key, found)
            submitted.append((kernels, key))
        return found

    jit_function._do_compile = remember
    try:
        yield
    finally:
        jit_function._do_compile = do_compile
        for kernels, key in submitted:
            if hasattr(kernels.get(key), "result"):  # a future still
                del kernels[key]


def _num_cores() -> int:
    """That we may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _use_this_device() -> Callable[[], None]:
    """For other threads, whose current device is the first."""
    if not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


@contextmanager
def compiling_ahead(processes: CompileProcesses | None = None, num_shards: int = 1) -> Iterator[CompiledKernels]:
    """Inside, Triton kernels are not launched: their results stay unwritten. Leaving it waits for all compilations. So
    many shards share the cores.

    A kernel that does not compile is left to its first launch, which reports it.
    """
    import triton
    from triton.runtime import driver

    run, device = triton.JITFunction.run, driver.active.get_current_device()
    compiler = _Compiler(processes)

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiler.replace(kernel, device)
        return run(kernel, *args, grid=grid, warmup=warmup or kernel.fn.__module__ != LAUNCHED, **kwargs)

    num_threads = max(1, min(_num_cores() // num_shards, MAX_THREADS))
    with ThreadPoolExecutor(num_threads, "compile", initializer=_use_this_device()) as threads:
        triton.JITFunction.run = compile_only
        try:
            with (
                _submitted_once(triton.JITFunction),
                triton.AsyncCompileMode(_LoadingExecutor(threads), ignore_errors=True),
            ):
                yield compiler.counts
        finally:
            triton.JITFunction.run = run
            compiler.restore()
