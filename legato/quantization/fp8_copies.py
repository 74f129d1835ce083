"""fp8 copies of 4-bit matrices, if device memory allows (`--fp8-copy-fraction`).

With few rows a product takes as long as its matrix is read, and 4 bits are best. With more rows the matrix units
decide, and unpacking costs as much as multiplying: on an H200 256 rows take 1.8 times as long with 4-bit weights as
with fp8. A copy is rounded to fp8 with one scale for each row, as rows of activations are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from legato.kernels.quantized.linear import can_copy_to_fp8
from legato.kernels.quantized.unpack import unpacked_rows
from legato.quantization.weight import QuantizedWeight

logger = logging.getLogger(__name__)


def keep_fp8_copies(weights: Sequence[QuantizedWeight], fraction: float) -> None:
    """Of all matrices or of none, if they take no more than this fraction of what is free on the device."""
    packed = [weight for weight in weights if weight.operand is not None and can_copy_to_fp8(weight.operand)]
    if not packed or fraction == 0:
        return
    size = sum(weight.matrix.out_features * weight.matrix.in_features for weight in packed)
    free = _free_memory(packed[0].matrix.device)
    if size > fraction * free:
        logger.info(
            "No fp8 copies of 4-bit weights: steps of more than 16 rows are slower",
            extra={"fields": {"gb_needed": round(size / 1e9, 1), "gb_allowed": round(fraction * free / 1e9, 1)}},
        )
        return
    for weight in packed:
        assert weight.operand is not None
        weight.keep_fp8_copy(unpacked_rows(weight.operand))
    logger.info(
        "fp8 copies of 4-bit weights for steps of more than 16 rows", extra={"fields": {"gb": round(size / 1e9, 1)}}
    )


def _free_memory(device: torch.device) -> int:
    """Memory that torch holds and does not use counts as free."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
