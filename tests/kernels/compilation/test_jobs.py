"""Jobs: what is decoded is what was encoded, and what cannot be said in numbers and strings is not a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from legato.kernels import norm
from legato.kernels.compilation import jobs

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps": 4, "launch_pdl": True, "maxnreg": None, "extern_libs": (("libdevice", "/lib"),)}


@dataclass
class Kernel:
    """As Triton's, which is another class in its interpreter."""

    fn: Any = field(default_factory=lambda: SimpleNamespace(__module__=norm.__name__, __qualname__="_made_up_kernel"))
    __name__ = "_made_up_kernel"
    arg_names = ("out", "eps", "BLOCK")


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(norm, "_made_up_kernel", made, raising=False)
    return made


def source(kernel: Kernel, block: object = 128) -> ASTSource:
    signature = {"out": "*bf16", "eps": ("fp32", "i32"), "BLOCK": "constexpr"}
    return ASTSource(kernel, signature, {(2,): block, (1, 0): 1e-5}, {(0,): [["tt.divisibility", 16]]})


@pytest.mark.parametrize("block", [128, 1e-7, True, None, "silu", float("inf"), (64, 64)])
def test_what_is_decoded_is_what_was_encoded(kernel, block):
    src = source(kernel, block)
    job = jobs.encode(src, TARGET, OPTIONS)
    assert job is not None
    again, target, options = jobs.decode(job)
    assert again.fn is kernel and type(again) is ASTSource
    assert repr((again.signature, again.constants, again.attrs)) == repr((src.signature, src.constants, src.attrs))
    assert target == TARGET and repr(options) == repr(OPTIONS)


@pytest.mark.parametrize("block", [object(), 2**40 + 0j, [64, 64], {1: 2}])
def test_other_constants_are_not_sent(kernel, block):
    assert jobs.encode(source(kernel, block), TARGET, OPTIONS) is None


def test_a_kernel_that_cannot_be_found_by_its_name_is_not_sent(kernel, monkeypatch):
    monkeypatch.setattr(norm, "_made_up_kernel", Kernel())
    assert jobs.encode(source(kernel), TARGET, OPTIONS) is None


def test_a_kernel_of_another_package_is_neither_sent_nor_taken(kernel):
    job = jobs.encode(source(kernel), TARGET, OPTIONS)
    kernel.fn.__module__ = "torch.nn"
    assert jobs.encode(source(kernel), TARGET, OPTIONS) is None
    with pytest.raises(ValueError, match="torch"):
        jobs.decode(job.replace(b"legato.kernels.norm", b"torch.nn"))
