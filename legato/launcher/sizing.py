"""Number of shards, listen address, and consistency of the limits."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping

from legato.common.errors import OptionError
from legato.common.options import LauncherOptions

logger = logging.getLogger(__name__)

# Variables that list the visible devices, in order of precedence.
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
ANY_ADDRESS = "0.0.0.0"


def num_devices(environ: Mapping[str, str], installed: Callable[[], int]) -> int | None:
    """Number of visible devices by the environment, or None if it does not say. `installed` counts all devices."""
    granted = next((environ[name] for name in DEVICE_VARIABLES if name in environ), None)
    if granted is None:
        return None
    if granted.strip().lower() in ("all", "void"):
        return installed()
    ids = [part.strip() for part in granted.split(",")]
    # CUDA stops at the first invalid id: "-1" and "" hide all devices.
    return next((i for i, name in enumerate(ids) if name in ("", "-1", "none", "NoDevFiles")), len(ids))


def installed_gpus() -> int:
    """Number of GPUs listed by nvidia-smi; 0 without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def num_shards(sharded: bool | None, num_shard: int | None, devices: int | None) -> int:
    """Number of shards.

    sharded   num_shard   result
    true      -           all devices, at least two
    true      n           n, at least two
    false     any         1
    -         -           all devices, or 1 if their number is unknown
    -         n           n
    """
    if sharded is False:
        return 1
    count = num_shard if num_shard is not None else devices or 1
    if sharded and count <= 1:
        found = f"--num-shard is {num_shard}" if num_shard is not None else f"{devices or 0} devices are visible"
        raise OptionError(f"--sharded true needs at least two devices, but {found} (see CUDA_VISIBLE_DEVICES)")
    if count < 1:
        raise OptionError(f"--num-shard must be at least 1, not {count}")
    return count


def listen_address(hostname: str) -> str:
    """The address for --hostname. Containers set HOSTNAME to the container's name, which must not be an error."""
    if hostname == "localhost":
        return "127.0.0.1"
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, hostname)
        except OSError:
            continue
        return hostname
    logger.warning("--hostname (HOSTNAME): %r is not an IP address; listening on %s", hostname, ANY_ADDRESS)
    return ANY_ADDRESS


def check_limits(options: LauncherOptions) -> None:
    """Refuse contradictory limits. The router checks those that depend on the model and on memory."""
    if options.validation_workers < 1:
        raise OptionError("--validation-workers must be at least 1")
    _check_order(options, "max_input_tokens", "max_total_tokens", strict=True)
    _check_order(options, "max_total_tokens", "max_batch_total_tokens")
    _check_order(options, "max_batch_prefill_tokens", "max_batch_total_tokens")


def _check_order(options: LauncherOptions, smaller: str, larger: str, strict: bool = False) -> None:
    low, high = getattr(options, smaller), getattr(options, larger)
    if low is None or high is None or low < high or (low == high and not strict):
        return
    low_flag, high_flag = (f"--{name.replace('_', '-')}" for name in (smaller, larger))
    relation = "less than" if strict else "at most"
    raise OptionError(f"{low_flag} ({low}) must be {relation} {high_flag} ({high})")
