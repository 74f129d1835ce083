"""Nothing is compiled after the compilation ahead: what warm-up launches later is what was compiled then."""

from __future__ import annotations

import json

import pytest

from tests.kernels.test_compile import run_python

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=["15", "0"], ids=["with drafts", "without drafts"])
def kernels(request, tmp_path_factory) -> list[dict]:
    """Of the 8B shape on an H200, with the stage that asked for each first."""
    words = ("-m", "tests.kernels.warm_up", "--speculate", request.param)
    output = run_python(*words, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")), OMP_NUM_THREADS="1")
    return [json.loads(line) for line in output.splitlines()]


def test_later_stages_of_warm_up_compile_nothing(kernels):
    assert [kernel for kernel in kernels if kernel["stage"] != "ahead"] == []


def test_the_kernels_of_an_8b_model_are_among_those_compiled(kernels):
    assert {kernel["name"] for kernel in kernels} >= {
        "_advance_rows_kernel",
        "_chunk_kernel",
        "_decode_kernel",
        "_few_kernel",
        "_gate_and_mul_kernel",
        "_gated_linear_kernel",
        "_gather_rows_kernel",
        "_greedy_kernel",
        "_hopper_kernel",
        "_norm_kernel",
        "_rotary_and_store_kernel",
        "_small_linear_kernel",
        "_turned_kernel",
    }
