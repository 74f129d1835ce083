from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = 232448  # bytes, of a program on Hopper
ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, timeout: float = 240.0, **environment: str) -> str:
    """In a process of its own, where Triton compiles instead of interpreting."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    cache = tmp_path_factory.mktemp("triton")
    output = run_python("-m", "tests.kernels.hopper", TRITON_CACHE_DIR=str(cache))
    return [json.loads(line) for line in output.splitlines()]


def test_every_kernel_compiles_for_hopper(compiled):
    names = {kernel["name"] for kernel in compiled}
    assert names == {
        "_norm_kernel",
        "_rotary_and_store_kernel",
        "_rotate_patches_kernel",
        "_gate_and_mul_kernel",
        "_decode_kernel",
        "_turned_kernel",
        "_chunk_kernel",
        "_hopper_kernel",
        "_gated_linear_kernel",
        "_merge_parts_kernel",
        "_few_kernel",
        "_greedy_kernel",
        "_small_linear_kernel",
        "_span_kernel",
        "_group_rows_kernel",
        "_grouped_linear_kernel",
        "_single_token_kernel",
        "_one_row_kernel",
        "_tiled_kernel",
        "_tiles_kernel",
        "_grouped_quantized_kernel",
        "_unpack_kernel",
        "_quantize_rows_kernel",
        "_gate_rows_kernel",
        "_shrink_kernel",
        "_expand_kernel",
    }


def test_kernels_fit_the_shared_memory(compiled):
    assert all(kernel["shared"] <= SHARED_MEMORY for kernel in compiled)


def test_attention_runs_on_the_matrix_units(compiled):
    assert all(kernel["mma"] for kernel in compiled if kernel["name"] == "_decode_kernel")
    assert any(kernel["wgmma"] for kernel in compiled if kernel["name"] == "_chunk_kernel")
    assert all(kernel["wgmma"] for kernel in compiled if kernel["name"] == "_hopper_kernel")


def test_weights_keys_and_activations_are_loaded_16_bytes_at_a_time(compiled):
    # Which read scores and small integers; as many bytes of a row as it has columns of x in 16 bytes; and nothing but
    # what the copy unit loads.
    narrow = ("_greedy_kernel", "_group_rows_kernel", "_tiles_kernel", "_one_row_kernel", "_gated_linear_kernel")
    assert all(kernel["wide_loads"] for kernel in compiled if kernel["name"] not in narrow)


def test_products_of_a_rotation_are_rounded_before_they_are_added(compiled):
    """As transformers does. Left to itself the compiler fuses them, and one bfloat16 token in thirty is another."""
    assert [kernel["fused_bf16"] for kernel in compiled if kernel["name"] == "_rotary_and_store_kernel"] == [0] * 4
    assert [kernel["fused_bf16"] for kernel in compiled if kernel["name"] == "_turned_kernel"] == [0] * 2


def test_quantized_products_of_many_rows_run_on_the_fp8_units(compiled):
    few, many = (kernel for kernel in compiled if kernel["name"] == "_tiled_kernel")
    assert few["mma"] and not few["wgmma"]
    assert many["fp8_wgmma"] == many["wgmma"] > 0


def test_adapters_run_on_the_matrix_units(compiled):
    adapters = [kernel for kernel in compiled if kernel["name"] in ("_shrink_kernel", "_expand_kernel")]
    assert adapters and all(kernel["mma"] or kernel["wgmma"] for kernel in adapters)


def test_experts_with_many_rows_run_on_the_matrix_units(compiled):
    assert all(kernel["wgmma"] for kernel in compiled if kernel["name"] == "_grouped_linear_kernel")


def test_a_kernel_waits_for_the_previous_one_only_where_launches_overlap(compiled):
    assert [kernel["overlaps"] for kernel in compiled] == [False] * (len(compiled) - 1) + [True]


def test_without_triton_everything_runs_on_torch():
    run_python(
        "-c",
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from legato.kernels import rotary, small_linear\n"
        "from legato.kernels.attention import chunk, decode, hopper\n"
        "from legato.kernels.norm import rms_norm\n"
        "from legato.kernels.sample import greedy_sample\n"
        "rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)\n"
        "greedy_sample(torch.ones(2, 4))\n",
    )
