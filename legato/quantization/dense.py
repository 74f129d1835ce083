"""Plain matrices: fp32, bf16, fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.nn.functional as F

from legato.kernels.small_linear import pays, small_linear
from legato.kernels.split_linear import pays_to_split, split_linear


class DenseWeight:
    """The framework's own matrix product, and on a GPU kernels for the few rows where reading the weight is all."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self.weight = weight
        self.bias = bias

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if pays(x):
            return small_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def apply_in_parts(self, x: torch.Tensor) -> torch.Tensor:
        """As `apply`, or the parts [p, T, out] in float32 that the caller has to add up, whichever is faster."""
        if self.bias is None and pays_to_split(x, self.weight):
            return split_linear(x, self.weight)
        return self.apply(x)


class PackedWeight:
    """A large matrix in oneDNN's blocked order, for CPUs.

    A decode step reads every weight once, so its layout decides the speed: measured on two Zen cores with SmolLM2's
    shapes, 24 ms a step instead of 44 at batch 1 and 33 instead of 66 at batch 16.
    """

    # The row count that the order is chosen for. Packed for 64 it is as good for 1 and for 512; packed for 1 it is not.
    ROWS_HINT = 64

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS_HINT)
        self.bias = bias

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self.packed, self.bias)


class SlicedWeight(PackedWeight):
    """A small matrix, packed for decode steps and once more as it is for prompts, which add up its products in slices.

    One sum over all inputs rounds worse than a sum of sums, and not as MKL does, which slices so: SmolLM2's logits were
    1.5e-4 away from transformers' for that alone. Slices take more calls, for which a decode step has no time, and an
    order that oneDNN reads more slowly than its own, hence two copies. The rounding of large matrices is not worth as
    much memory.
    """

    SLICE = 192  # inputs
    MOST_WEIGHTS = 2**21

    _hurries: ClassVar[bool] = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.slices = torch.split(weight.t().contiguous().t(), self.SLICE, dim=1)

    @classmethod
    @contextmanager
    def in_one_sum(cls, hurries: bool) -> Iterator[None]:
        """While a decode step is computed, of which a process has one at a time."""
        cls._hurries = hurries
        try:
            yield
        finally:
            cls._hurries = False

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if self._hurries:
            return super().apply(x)
        first, *others = zip(torch.split(x, self.SLICE, dim=-1), self.slices, strict=True)
        total = _product(*first, self.bias)
        for inputs, weight in others:
            total = torch.ops.mkldnn._linear_pointwise.binary(inputs, total, weight, None, "add")
        return total


def dense_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseWeight | PackedWeight | SlicedWeight:
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _has_onednn():
        return DenseWeight(weight, bias)
    return (SlicedWeight if weight.numel() <= SlicedWeight.MOST_WEIGHTS else PackedWeight)(weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _has_onednn() -> bool:
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
