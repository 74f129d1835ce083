"""Compilation ahead of steps, without a device: the compiled kernels are those that launches find later."""

from __future__ import annotations

import pytest

from legato.kernels.compilation import ahead
from tests.kernels.test_compile import run_python

pytest.importorskip("triton")

# A driver that knows an H200 and notes what is launched and loaded.
PRELUDE = """
import torch, triton
from triton.runtime import driver
from tests.kernels.hopper import Driver, Launcher
from legato.kernels import activation, few_linear, norm
from legato.kernels.compilation import ahead, jobs
from legato.kernels.compilation.processes import CompileProcesses
from legato.kernels.rows import RowTables, _gather_rows_triton

launched, loaded = [], []
Launcher.__call__ = lambda self, *arguments: launched.append(1)
Driver.utils.load_binary = lambda name, *arguments: loaded.append(name) or (name, name, 0, 0, 1024)
x, weight = torch.zeros(2, 64), torch.ones(64)
integers = torch.zeros(2, dtype=torch.int32)
tables = RowTables(torch.zeros(2, 4, dtype=torch.int32), integers, torch.zeros(2, dtype=torch.int64), 16, 1)
variants = lambda kernel: [len(caches[0]) for caches in kernel.device_caches.values()]
"""

ON_THREADS = """
driver.set_active(Driver())
assert ahead.can_compile_ahead()
run, do_compile = triton.JITFunction.run, triton.JITFunction._do_compile
submitted = []
triton.JITFunction._do_compile = lambda kernel, *rest: submitted.append(kernel) or do_compile(kernel, *rest)
counting = triton.JITFunction._do_compile
with ahead.compiling_ahead() as counts:
    for _ in range(32):
        norm._norm_triton(x, weight, None, 1e-5, False)
    activation._gate_and_mul_triton(x, "silu")
    assert launched == []
    _gather_rows_triton(torch.zeros(1, dtype=torch.int32), tables)
    assert len(launched) == 1
assert triton.JITFunction.run is run and triton.JITFunction._do_compile is counting
assert len(submitted) == 3, submitted
assert sorted(loaded) == ["_gate_and_mul_kernel", "_gather_rows_kernel", "_norm_kernel"], loaded
assert variants(norm._norm_kernel) == variants(activation._gate_and_mul_kernel) == [1]
norm._norm_triton(x, weight, None, 1e-5, False)
assert variants(norm._norm_kernel) == [1] and len(launched) == 2 and len(loaded) == 3
assert counts == ahead.CompiledKernels(on_threads=3), counts
assert norm._norm_kernel.compile is triton.compiler.compile
print("done")
"""

IN_PROCESSES = """
import os
from triton.backends.nvidia.driver import CudaDriver

def refuse(*arguments):
    open(os.environ["TOUCHED"], "w").close()
    raise AssertionError("CUDA was called")

# What the processes inherit.
CudaDriver.__init__ = torch.cuda.init = torch.cuda._lazy_init = torch._C._cuda_init = refuse
processes = CompileProcesses.start()
driver.set_active(Driver())
compiled_here = []
compile_ttir = triton.compiler.compiler.ASTSource.make_ir
triton.compiler.compiler.ASTSource.make_ir = lambda src, *rest: compiled_here.append(src) or compile_ttir(src, *rest)
with ahead.compiling_ahead(processes) as counts:
    norm._norm_triton(x, weight, None, 1e-5, False)
    activation._gate_and_mul_triton(x, "silu")
    few_linear.few_linear(torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16))
assert counts == ahead.CompiledKernels(in_processes=3), counts
assert compiled_here == [], "what a process had compiled was not found in the cache"
assert len(loaded) == 3, loaded
assert not os.path.exists(os.environ["TOUCHED"])
# In the cache now, and nobody is asked.
for kernel in (norm._norm_kernel, activation._gate_and_mul_kernel):
    kernel.device_caches.clear()
processes.compile = None
with ahead.compiling_ahead(processes) as counts:
    norm._norm_triton(x, weight, None, 1e-5, False)
    activation._gate_and_mul_triton(x, "silu")
assert counts == ahead.CompiledKernels(found=2), counts
# Of no use where Triton compiles whatever the cache has.
triton.knobs.compilation.always_compile = True
norm._norm_kernel.device_caches.clear()
with ahead.compiling_ahead(processes) as counts:
    norm._norm_triton(x, weight, None, 1e-5, False)
assert counts == ahead.CompiledKernels(on_threads=1), counts
processes.close()
print("done")
"""

WITH_FAILURES = """
import logging, os, signal
from legato.kernels.few_linear import FewConfig

logging.basicConfig(format="%(message)s")
processes = CompileProcesses.start()
driver.set_active(Driver())
rows, matrix = torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
broken = FewConfig(tile_rows=24, block_k=128, num_warps=2)  # tiles have to be powers of two
with ahead.compiling_ahead(processes) as counts:
    few_linear.few_linear(rows, matrix, None, broken)
    norm._norm_triton(x, weight, None, 1e-5, False)
assert counts == ahead.CompiledKernels(in_processes=1), counts
assert variants(few_linear._few_kernel) == [0] and variants(norm._norm_kernel) == [1]
try:
    few_linear.few_linear(rows, matrix, None, broken)
except triton.errors.TritonError as error:
    assert "power of 2" in str(error), error
else:
    raise AssertionError("the launch reports nothing")
os.kill(processes._pid, signal.SIGKILL)
with ahead.compiling_ahead(processes) as counts:
    activation._gate_and_mul_triton(x, "silu")
assert counts == ahead.CompiledKernels(on_threads=1), counts
assert variants(activation._gate_and_mul_kernel) == [1]
processes.close()
processes.close()
print("done")
"""


def run(program: str, folder, **environment: str) -> str:
    return run_python("-c", PRELUDE + program, TRITON_CACHE_DIR=str(folder), **environment)


def test_kernels_are_compiled_once_and_not_launched(tmp_path):
    """But those whose results are indices are launched. 32 layers that launch a kernel have one submitted."""
    assert run(ON_THREADS, tmp_path).strip() == "done"


def test_processes_compile_what_the_shard_then_finds_and_never_call_cuda(tmp_path):
    assert run(IN_PROCESSES, tmp_path, TOUCHED=str(tmp_path / "touched")).strip() == "done"


def test_what_no_process_compiles_is_compiled_on_threads_or_left_to_its_launch(tmp_path):
    assert run(WITH_FAILURES, tmp_path).strip() == "done"


def test_without_triton_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(ahead, "tl", None)
    assert not ahead.can_compile_ahead()


def test_in_the_interpreter_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(ahead, "is_interpreted", lambda: True)
    assert not ahead.can_compile_ahead()
