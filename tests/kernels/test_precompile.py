"""Compilation ahead of steps, without a device: the compiled kernels are those that launches find later."""

from __future__ import annotations

import pytest

from legato.kernels import precompile
from tests.kernels.test_compile import run_python

pytest.importorskip("triton")

PROGRAM = """
import torch, triton
from triton.runtime import driver
from tests.kernels.hopper import Driver, Launcher
from legato.kernels import activation, norm, precompile
from legato.kernels.rows import RowTables, _gather_rows_triton

launched, loaded = [], []
Launcher.__call__ = lambda self, *arguments: launched.append(1)
Driver.utils.load_binary = lambda name, *arguments: loaded.append(name) or (name, name, 0, 0, 1024)
driver.set_active(Driver())
assert precompile.can_compile_ahead()
run = triton.JITFunction.run
x, weight = torch.zeros(2, 64), torch.ones(64)
integers = torch.zeros(2, dtype=torch.int32)
tables = RowTables(torch.zeros(2, 4, dtype=torch.int32), integers, torch.zeros(2, dtype=torch.int64), 16, 1)
with precompile.compiling_ahead():
    norm._norm_triton(x, weight, None, 1e-5, False)
    activation._gate_and_mul_triton(x, "silu")
    assert launched == []
    _gather_rows_triton(torch.zeros(1, dtype=torch.int32), tables)
    assert len(launched) == 1
assert triton.JITFunction.run is run
assert sorted(loaded) == ["_gate_and_mul_kernel", "_gather_rows_kernel", "_norm_kernel"], loaded
for kernel in (norm._norm_kernel, activation._gate_and_mul_kernel):
    (cache, *_), = kernel.device_caches.values()
    assert len(cache) == 1, cache
norm._norm_triton(x, weight, None, 1e-5, False)
(cache, *_), = norm._norm_kernel.device_caches.values()
assert len(cache) == 1 and len(launched) == 2 and len(loaded) == 3
print("done")
"""


def test_kernels_are_compiled_and_not_launched(tmp_path):
    """But those whose results are indices are launched."""
    assert run_python("-c", PROGRAM, TRITON_CACHE_DIR=str(tmp_path)).strip() == "done"


def test_without_triton_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(precompile, "tl", None)
    assert not precompile.can_compile_ahead()
