"""Errors after which this process can no longer use its device.

An illegal memory access, a failed assertion in a kernel or a lost GPU corrupts the CUDA context: every later call of
the process fails with the same error. So the shard ends, and the launcher starts another, which replays the requests.
"""

from __future__ import annotations

import logging

import torch

from legato.common.exits import exit_now
from legato.common.restarts import EXIT_DEVICE_FAILED
from legato.server.memory.budget import is_out_of_memory

logger = logging.getLogger(__name__)

# Messages of errors that older versions of torch, and Triton, do not type.
DEVICE_WORDS = ("CUDA error", "CUDA driver error", "device-side assert", "illegal memory access", "unspecified launch")


def is_device_failure(error: BaseException) -> bool:
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(words in str(error) for words in DEVICE_WORDS)


def end_if_device_failed(doing: str, error: BaseException) -> None:
    """End this process if `error` leaves it without a device."""
    if is_device_failure(error):
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.error("The device failed in %s: this shard exits", doing, exc_info=error)
        exit_now(f"the device failed in {doing}: {reason}", EXIT_DEVICE_FAILED)
