"""Triton, if it is installed. Otherwise kernels are defined, so that every module can be imported, but never run.

Kernels take their names from here. Their parameters are annotated with three words: Triton reads the text of an
annotation, acts on "constexpr" (a value known when the kernel is compiled) and ignores "Pointer" and "Scalar".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

tl: Any
jit: Callable[[Callable[..., Any]], Any]
compile_time: Callable[[Callable[..., Any]], Any]
try:
    import triton

    tl, jit, compile_time = triton.language, triton.jit, triton.constexpr_function
    TritonError: type[Exception] = triton.errors.TritonError
except ImportError:
    TritonError = ImportError
    tl, jit, compile_time = None, lambda kernel: kernel, lambda function: function

if TYPE_CHECKING or tl is None:
    constexpr: TypeAlias = Any
    Pointer: TypeAlias = Any
    Scalar: TypeAlias = Any
else:
    # The compiler looks the names up and accepts only Triton's own.
    constexpr = tl.constexpr
    Pointer = Scalar = tl.tensor


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit`, but compiled once whatever these arguments are: they differ from step to step. Triton would make a kernel
    of its own for numbers that are 1 or multiples of 16 and for addresses that are multiples of 16, and to compile one
    takes most of a second, in which no step runs."""
    return lambda kernel: kernel if tl is None else triton.jit(kernel, do_not_specialize=names)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which knows no assembly."""
    return tl is not None and bool(triton.knobs.runtime.interpret)


_is_enabled = True


def enable_triton(enabled: bool) -> None:
    """For this process, before the first step: False is `--disable-custom-kernels`."""
    global _is_enabled
    _is_enabled = enabled


def runs_triton(tensor: Tensor) -> bool:
    """One rule for every kernel: CUDA tensors go through Triton unless it is disabled, all others through torch."""
    return _is_enabled and tensor.is_cuda and tl is not None


def is_available(kernel: Callable[..., Any], tensor: Tensor) -> bool:
    """Whether `kernel_or_torch` would run `kernel`."""
    return runs_triton(tensor) and kernel not in _failed


_failed: set[Callable[..., Any]] = set()


def kernel_or_torch(tensor: Tensor, kernel: Callable[P, T], reference: Callable[P, T]) -> Callable[P, T]:
    """`kernel`, which launches Triton kernels, for tensors that go through Triton; else `reference`, in torch.

    A kernel that does not compile or does not fit the device is replaced by its reference from then on, with one
    warning: requests run slower instead of failing. Compilation comes before the launch, so nothing is written twice.
    """
    if not is_available(kernel, tensor):
        return reference
    return partial(_run_or_fall_back, kernel, reference)


def _run_or_fall_back(kernel: Callable[P, T], reference: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return kernel(*args, **kwargs)
    except (TritonError, RuntimeError) as error:
        if not (isinstance(error, TritonError) or "PassManager" in str(error)):
            raise
        _failed.add(kernel)
        cause = str(error).partition("\n")[0]
        logger.warning("%s does not run on this device (%s); using torch instead", kernel.__name__, cause)
    return reference(*args, **kwargs)


def widened(tensor: Tensor) -> Tensor:
    """For the torch versions: fp32, or float64 if the caller wants a reference in that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_two(n: int, least: int = 1) -> int:
    """Tile sides are powers of two; what lies beyond the data is masked."""
    return max(1 << (n - 1).bit_length(), least)


# The same, for a tile whose size the kernel knows when it is compiled.
padded = compile_time(next_power_of_two)
