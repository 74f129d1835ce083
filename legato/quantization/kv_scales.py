"""Scales of keys and values, which checkpoints have for an 8-bit KV cache, by the names of their tensors.

    P.k_proj.k_scale, P.v_proj.v_scale              AutoFP8, ModelOpt
    P.k_scale, P.v_scale                            compressed-tensors, AutoFP8
    P.k_proj.output_scale, P.v_proj.output_scale    Quark, older compressed-tensors
    P.kv_scale                                      older AutoFP8: one for both

A tensor has one number, or one for each head. The largest is taken for all heads: numbers of 8 bits have an exponent of
their own, so that a scale decides about the range alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from legato.kernels.kv_format import KVScales
from legato.quantization.stored import StoredTensors

OF_KEYS, OF_VALUES = (".k_scale", ".k_proj.output_scale"), (".v_scale", ".v_proj.output_scale")
OF_BOTH = (".kv_scale",)
# In names of towers, which have no cache.
TOWERS = ("vision", "visual")


@dataclass(slots=True)
class ScaleNames:
    """The tensors of one layer."""

    keys: str | None = None
    values: str | None = None


def scale_names(names: Iterable[str]) -> dict[int, ScaleNames]:
    """By the number of the layer."""
    found: dict[int, ScaleNames] = {}
    for name in names:
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is None or not name.endswith(OF_KEYS + OF_VALUES + OF_BOTH) or any(part in name for part in TOWERS):
            continue
        layer = found.setdefault(number, ScaleNames())
        if name.endswith(OF_KEYS + OF_BOTH):
            layer.keys = name
        if name.endswith(OF_VALUES + OF_BOTH):
            layer.values = name
    return found


def read_scales(
    names: ScaleNames | None, read: Callable[[str], torch.Tensor], tensors: StoredTensors
) -> KVScales | None:
    """None where there are none, or all are one. Where a layer has one of the two, it is for both."""
    if names is None:
        return None
    keys, values = (None if name is None else _positive(name, read, tensors) for name in (names.keys, names.values))
    scales = KVScales(keys or values or 1.0, values or keys or 1.0)
    return None if scales == KVScales(1.0, 1.0) else scales


def _positive(name: str, read: Callable[[str], torch.Tensor], tensors: StoredTensors) -> float | None:
    """None for a number that is not positive, which vLLM takes for none, too."""
    number = float(read(name).float().max())
    if not math.isfinite(number):
        raise tensors.fault(name, f"is {number}, not a positive number")
    return number if number > 0 else None
