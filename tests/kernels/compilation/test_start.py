"""What begins while weights are loaded is there when compilation begins, and gone when it is over."""

from __future__ import annotations

import pytest

from legato.common.options import ServerOptions
from legato.server import loading
from tests.kernels.test_compile import run_python

pytest.importorskip("triton")

PROGRAM = """
import os, threading
from triton.runtime.cache import triton_key
from legato.kernels.compilation.start import CompilerStart

start = CompilerStart()
assert "compiler" in [thread.name for thread in threading.enumerate()]
processes = start.processes()
assert triton_key.cache_info().currsize == 1
assert "JSONDecodeError" in processes.compile(b"{")
start.close()
start.close()
assert start.processes() is None
try:
    os.kill(processes._pid, 0)
except ProcessLookupError:
    print("done")
"""


def test_the_hash_of_the_compiler_is_known_and_the_processes_end(tmp_path):
    assert run_python("-c", PROGRAM, TRITON_CACHE_DIR=str(tmp_path)).strip() == "done"


@pytest.mark.parametrize(
    ("options", "has_cuda", "can_compile", "begins"),
    [
        ({}, True, True, True),
        ({"device": "cuda"}, True, True, True),
        ({"device": "cpu"}, True, True, False),
        ({"disable_custom_kernels": True}, True, True, False),
        ({}, False, True, False),
        ({}, True, False, False),
    ],
)
def test_only_a_shard_with_kernels_on_a_gpu_forks(monkeypatch, options, has_cuda, can_compile, begins):
    made = object()
    monkeypatch.setattr(loading.torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(loading, "can_compile_ahead", lambda: can_compile)
    monkeypatch.setattr(loading, "CompilerStart", lambda: made)
    assert loading.begin_compiler(ServerOptions(**options)) is (made if begins else None)
