"""Writers of the published layouts of quantized checkpoints, in numpy, independent of Legato's readers.

Each takes a matrix [out, in] and returns the tensors that a checkpoint has for it and the numbers that they stand for.
Quantization is round to nearest: it is the layout that matters here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray
Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, Array]  # suffix of the name -> tensor; the dequantized matrix
GROUP = 64


@dataclass(frozen=True)
class Layout:
    """A format: the configuration, and how a matrix becomes tensors. `name` is that of the module."""

    config: dict[str, Any]
    pack: Callable[[str, Array], Packed]
    file: str = "config.json"  # where the configuration is written


def bit_stream(values: Array, bits: int) -> Array:
    """[..., count] -> [..., count·bits/32] int32, little-endian along the last dimension."""
    binary = (values[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & np.uint64(1)
    binary = binary.reshape(*values.shape[:-1], -1, 32)
    return (binary << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def as_tensors(**arrays: Array | torch.Tensor) -> Tensors:
    return {
        name: array if isinstance(array, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(array))
        for name, array in arrays.items()
    }


def integers(w: Array, bits: int, index: Array, sym: bool) -> tuple[Array, Array, Array]:
    """Codes [out, in], scales [out, groups] fp16 and zeros [out, groups], by the group of each input."""
    top = (1 << bits) - 1
    num_groups = index.max() + 1
    scales, zeros, codes = np.empty((len(w), num_groups)), np.empty((len(w), num_groups)), np.empty(w.shape)
    for group in range(num_groups):
        part = w[:, index == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if sym:
            high = np.maximum(high, -low)
            low = -high
        scale = np.maximum((high - low) / top, 1e-4).astype(np.float16).astype(np.float64)
        zero = np.full(len(w), (top + 1) / 2) if sym else np.clip(np.round(-low / scale), 0, top)
        scales[:, group], zeros[:, group] = scale, zero
        codes[:, index == group] = np.clip(np.round(part / scale[:, None]) + zero[:, None], 0, top)
    return codes.astype(np.int64), scales.astype(np.float16), zeros.astype(np.int64)


def dequantized(codes: Array, scales: Array, zeros: Array, index: Array) -> Array:
    return (codes - zeros[:, index]) * scales.astype(np.float32)[:, index]


def act_order(num_inputs: int, size: int, seed: int) -> Array:
    """The groups of the inputs where those with large activations come first."""
    order = np.random.default_rng(seed).permutation(num_inputs)
    index = np.empty(num_inputs, dtype=np.int64)
    index[order] = np.arange(num_inputs) // size
    return index


def gptq(
    bits: int = 4, *, group: int = GROUP, desc_act: bool = False, sym: bool = True, v2: bool = False,
    file: str = "config.json", tensors: bool = False, zero_index: bool = False,
) -> Layout:  # fmt: skip
    def pack(name: str, w: Array) -> Packed:
        num_inputs = w.shape[1]
        size = group if group > 0 else num_inputs
        # q, k and v of a layer read the same inputs, and so have the same order; one layer's have not.
        index = act_order(num_inputs, size, hash_of(name)) if desc_act else np.arange(num_inputs) // size
        codes, scales, zeros = integers(w, bits, index, sym)
        stored = zeros if v2 else (zeros - 1) & ((1 << bits) - 1)
        found = as_tensors(
            qweight=np.ascontiguousarray(bit_stream(codes, bits).T),
            qzeros=bit_stream(np.ascontiguousarray(stored.T), bits),
            scales=scales.T,
            g_idx=(np.zeros_like(index) if zero_index else index).astype(np.int32),
        )
        return found, dequantized(codes, scales, zeros, index)

    config: dict[str, Any] = dict(bits=bits, group_size=group, desc_act=desc_act, sym=sym)
    if tensors:
        return Layout(config, pack, "tensors")
    if file == "config.json":
        config |= {"quant_method": "gptq", "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    return Layout(config, pack, file)


def hash_of(name: str) -> int:
    """The same for q and k, and for gate and up, so that some products are one and others are not."""
    return sum(name.replace("k_proj", "q_proj").replace("up_proj", "gate_proj").encode())
