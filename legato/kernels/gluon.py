"""Gluon, if Triton has it: kernels with explicit warp roles and data layouts, in the same compiler.

As in `language.py`, kernels are defined in any case, so that every module imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

gl: Any
mbarrier: Any
tma: Any
fence_async_shared: Any
warpgroup_mma: Any
warpgroup_mma_wait: Any
gdc_launch_dependents: Any
gdc_wait: Any
TensorDescriptor: Any
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia import hopper as host
    from triton.language.extra import cuda

    gl, mbarrier, tma, TensorDescriptor = language, hopper.mbarrier, hopper.tma, host.TensorDescriptor
    fence_async_shared = hopper.fence_async_shared
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
    gdc_launch_dependents, gdc_wait = cuda.gdc_launch_dependents, cuda.gdc_wait
except ImportError:
    gl = mbarrier = tma = TensorDescriptor = fence_async_shared = None
    warpgroup_mma = warpgroup_mma_wait = gdc_launch_dependents = gdc_wait = None


def gluon_jit(*not_specialized: str) -> Callable[[Callable[..., Any]], Any]:
    """Compiled once whatever these arguments are, as with `jit_for_any`."""
    return lambda kernel: kernel if gl is None else gluon.jit(kernel, do_not_specialize=not_specialized)
