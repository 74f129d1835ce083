"""Kernels fit the cards that are not here: compiled for them, they say how much shared memory and registers they need.

That takes minutes and is left to `make test-cards`. `-k smallest` is quick: what needs the most of the cards with the
least.
"""

from __future__ import annotations

import ast
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from legato.kernels import language
from legato.kernels.device import AttentionTile, GpuLimits
from tests.kernels.test_compile import run_python

triton = pytest.importorskip("triton")

# As in `cards.py`, which cannot be imported here: it needs Triton's compiler, and these tests its interpreter.
SHARED_MEMORY = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
REGISTERS = 65536


def compiled_for(sm: int, folder, *options: str, timeout: float = 240.0) -> list[dict]:
    """In as many processes as there are cores, which share what they compile."""
    num_parts = len(os.sched_getaffinity(0)) if "--quick" not in options else 1

    def part(number: int) -> str:
        words = ("-m", "tests.kernels.cards", str(sm), "--part", str(number), str(num_parts), *options)
        return run_python(*words, timeout=timeout, TRITON_CACHE_DIR=str(folder))

    with ThreadPoolExecutor(num_parts) as pool:
        return [json.loads(line) for output in pool.map(part, range(num_parts)) for line in output.splitlines()]


def check_card(sm: int, folder, *options: str, timeout: float = 240.0) -> None:
    kernels = compiled_for(sm, folder, *options, timeout=timeout)
    assert {kernel["name"] for kernel in kernels if "name" in kernel} >= {"_chunk_kernel", "_decode_kernel"}
    assert [kernel for kernel in kernels if "error" in kernel] == []
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY[sm]] == []
    assert [kernel for kernel in kernels if kernel["registers"] > REGISTERS] == []


@pytest.mark.cards
@pytest.mark.parametrize("sm", [75, 86])
def test_attention_fits_the_smallest_cards(sm, tmp_path):
    check_card(sm, tmp_path, "--quick")


@pytest.mark.cards
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sm", SHARED_MEMORY)
def test_every_kernel_fits(sm, tmp_path):
    check_card(sm, tmp_path, timeout=7000)


def kernel_names() -> set[str]:
    """Of all kernels that are launched."""
    trees = (ast.parse(path.read_text()) for path in Path(language.__file__).parent.rglob("*.py"))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if node.name.endswith("_kernel") and node.decorator_list}


@pytest.mark.cards
@pytest.mark.timeout(7200)
def test_every_kernel_is_compiled(tmp_path):
    """For Hopper, which has them all. What needs no card of its own is enough: bfloat16, and heads of 64 and 128."""
    names = ("bfloat16", "rows")
    compiled = [kernel for name in names for kernel in compiled_for(90, tmp_path, "--only", name, timeout=7000)]
    assert {kernel["name"] for kernel in compiled} >= kernel_names()


@pytest.fixture
def on_gpu(monkeypatch) -> None:
    monkeypatch.setattr(language, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(language, "_failed", set())


def test_a_kernel_that_does_not_fit_is_replaced_by_torch_with_one_warning(on_gpu, caplog):
    calls = []

    def kernel(x: int) -> int:
        calls.append(x)
        raise triton.runtime.errors.OutOfResources(262144, 101376, "shared memory")

    for _ in range(3):
        assert language.kernel_or_torch(None, kernel, lambda x: -x)(5) == -5
    assert calls == [5]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "262144" in caplog.text and "torch" in caplog.text
    assert not language.is_available(kernel, None)


def test_an_error_of_the_device_is_not_hidden(on_gpu):
    def kernel() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        language.kernel_or_torch(None, kernel, lambda: None)()


def test_the_estimate_covers_what_triton_allocated():
    """Bytes of compiled kernels for 8.6: rows, keys, head size, bytes of a number, stages."""
    for shape, allocated in (
        ((128, 128, 128, 2, 2), 131072),
        ((64, 64, 128, 2, 2), 57600),
        ((64, 64, 256, 2, 3), 107008),
        ((64, 32, 128, 4, 2), 73984),
        ((16, 32, 256, 4, 2), 84032),
    ):
        assert AttentionTile(*shape).shared_memory(GpuLimits(86, 101376)) >= allocated
