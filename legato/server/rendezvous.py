"""How the shards of a model form a process group, and when one of them has to end."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from legato.common.errors import EndpointInUse, OptionError
from legato.common.options import ServerOptions
from legato.layers.shard import Shard
from legato.server.memory import OutOfMemory

# For the others to start, to load, or to finish a step. A shard that ends is noticed at once.
LONGEST_WAIT = timedelta(minutes=20)


def join(options: ServerOptions, device: torch.device) -> Shard:
    """Join the process group: NCCL on GPUs, gloo on CPUs. A single shard needs none."""
    rank, world_size = options.rank, options.world_size
    if world_size == 1:
        return Shard()
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{options.master_addr}:{options.master_port}",
            rank=rank,
            world_size=world_size,
            timeout=LONGEST_WAIT,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        where = f"{options.master_addr}:{options.master_port}"
        if "address already in use" in str(error).lower():
            raise EndpointInUse(f"--master-port {options.master_port}: another process listens on {where}") from None
        reason = str(error).splitlines()[0]
        raise OptionError(
            f"shard {rank} cannot reach the others at {where} (--master-addr, --master-port): {reason}"
        ) from None
    return Shard(rank, world_size)


def end_if_out_of_sync(shard: Shard, doing: str, error: Exception) -> None:
    """End this process if `error` may have left the other shards waiting for it in a collective.

    Out of memory, a failed kernel or a lost peer happens on one shard. Every other error is caused by the request, and
    is the same on all shards.
    """
    if shard.world_size > 1 and isinstance(error, RuntimeError | MemoryError | OutOfMemory):
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"error: shard {shard.rank} failed in {doing}: {reason}", file=sys.stderr, flush=True)
        os._exit(1)


def share_cores(world_size: int) -> None:
    """On a CPU all shards compute at once: each takes its share of the cores, unless OMP_NUM_THREADS is set."""
    if world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
