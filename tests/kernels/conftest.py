"""Every kernel is compared with its torch version, on the GPU if there is one, else in Triton's interpreter.

Triton decides for its interpreter when it is first imported, hence before any test imports a kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

try:
    import triton
    from triton.runtime import interpreter
except ImportError:
    triton = interpreter = None

Randn = Callable[..., torch.Tensor]


def patch_interpreter() -> None:
    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot
    create_fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp

    def patch_tensor_for_numpy_2_4(tensor: type, scope: Any) -> None:
        """Triton 3.6 makes numbers of a loop's bounds by int() of a one-element array, which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    def create_dot_of_bfloat16(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter keeps bfloat16 as 16-bit integers and would multiply those."""
        float32 = interpreter.tl.float32
        a, b = (builder.cast_impl(x, float32) if x.dtype.scalar.is_bf16() else x for x in (a, b))
        return create_dot(builder, a, b, *rest)

    def create_fp_to_fp8(builder: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        """The interpreter does not carry when it rounds a full mantissa up."""
        kinds = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
        if dst_type.scalar.name not in kinds:
            return create_fp_to_fp(builder, src, dst_type, rounding)
        numbers = torch.from_numpy(builder.cast_impl(src, interpreter.tl.float32).data)
        data = numbers.to(kinds[dst_type.scalar.name]).view(torch.uint8).numpy()
        return interpreter.TensorHandle(data, dst_type.scalar)

    interpreter._patch_lang_tensor = patch_tensor_for_numpy_2_4
    interpreter.InterpreterBuilder.create_dot = create_dot_of_bfloat16
    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp8


if interpreter is not None:
    patch_interpreter()


@pytest.fixture
def device() -> torch.device:
    """Where Triton's kernels run."""
    if triton is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return torch.device("cuda")
    compiled = isinstance(triton.language.sum, triton.JITFunction)
    assert not compiled, "another test imported Triton first: set TRITON_INTERPRET=1"
    return torch.device("cpu")


@pytest.fixture
def randn(device: torch.device) -> Randn:
    """Seeded normal noise: randn(2, 3, dtype=torch.bfloat16)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype=dtype, device=device)

    return draw


@pytest.fixture
def assert_close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Equal up to the rounding of the result's dtype. NaN never passes."""
    tolerances = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = tolerances[actual.dtype]
        torch.testing.assert_close(
            actual.double(), expected.double(), rtol=tolerance, atol=tolerance, check_device=False
        )

    return check
