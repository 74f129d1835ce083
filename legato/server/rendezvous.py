"""How the shards of a model form a process group, and when one of them has to end."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from legato.cluster.frames import BrokenLink
from legato.common.errors import EndpointInUse, OptionError
from legato.common.exits import exit_now
from legato.common.options import ServerOptions
from legato.cpu.threads import usable_cores
from legato.layers.shard import Shard
from legato.server.memory.budget import OutOfMemory
from legato.server.nodes.joining import ShardLinks

# For the others to start, to load, or to finish a step. A shard that ends is noticed at once.
LONGEST_WAIT = timedelta(minutes=20)


def join(options: ServerOptions, device: torch.device, links: ShardLinks | None = None) -> Shard:
    """Join the process group: NCCL on GPUs, gloo on CPUs. A single shard needs none."""
    rank, world_size = options.rank, options.world_size
    if links is not None:
        return _join_stage(options, device, links)
    if world_size == 1:
        return Shard()
    try:
        address = resolve(options.master_addr, options.master_port)
        if ipaddress.ip_address(address).is_loopback:
            stay_on_loopback()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_store(address, options),
            rank=rank,
            world_size=world_size,
            timeout=LONGEST_WAIT,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{options.master_addr}:{options.master_port}"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise EndpointInUse(f"--master-port {options.master_port}: another process listens on {where}") from None
        reason = str(error).splitlines()[0]
        raise OptionError(
            f"shard {rank} cannot reach the others at {where} (--master-addr, --master-port): {reason}"
        ) from None
    return Shard(rank, world_size)


def _join_stage(options: ServerOptions, device: torch.device, links: ShardLinks) -> Shard:
    """The shards of a stage on one machine find each other by a file: no port is open for that."""
    shard = links.shard(device)
    if shard.world_size == 1 or shard.collectives is not None:
        return shard
    stay_on_loopback()
    file = f"{os.path.abspath(options.uds_path)}.store.{options.group_id}.{shard.stage}"  # the launcher removes it
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(file, shard.world_size),  # type: ignore[attr-defined]  # not in its __all__
            rank=shard.rank,
            world_size=shard.world_size,
            timeout=LONGEST_WAIT,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"shard {options.rank} cannot reach the others of its stage: {reason}") from None
    return shard


def resolve(host: str, port: int) -> str:
    """The address that all shards use. `localhost` is 127.0.0.1 wherever there is one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return str(found[0][4][0])


def _store(address: str, options: ServerOptions) -> Any:
    """Where the shards find each other. By itself, torch would listen on every interface, to anybody. Shards of another
    server with the same port come here, too, before they learn that it is taken: they have another group."""
    listener = _listener(address, options.master_port) if options.rank == 0 else None
    store = dist.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
        address,
        options.master_port,
        options.world_size,
        is_master=listener is not None,
        timeout=LONGEST_WAIT,
        wait_for_workers=not options.group_id,
        # The store owns the descriptor from here on.
        master_listen_fd=None if listener is None else listener.detach(),
    )
    return dist.PrefixStore(options.group_id, store) if options.group_id else store  # type: ignore[attr-defined]


def _listener(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def stay_on_loopback() -> None:
    """All shards are on this machine: gloo and NCCL need no other interface, unless the user names one."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for name in names[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def end_if_out_of_sync(shard: Shard, doing: str, error: Exception) -> None:
    """End this process if `error` may have left the other shards waiting for it in a collective.

    Out of memory, a failed kernel or a lost peer happens on one shard. Every other error is caused by the request, and
    is the same on all shards; but stages of a pipeline compute different things.
    """
    is_own = isinstance(error, RuntimeError | MemoryError | OutOfMemory | BrokenLink)
    if shard.num_stages > 1 or (shard.world_size > 1 and is_own):
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        exit_now(f"shard {shard.rank} failed in {doing}: {reason}")


def share_cores(world_size: int) -> None:
    """torch computes with as many threads as there are CPUs for this process, by its affinity and the quota of its
    container. All shards compute at once: each takes its share. OMP_NUM_THREADS, if set, is the number for each."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    current = torch.get_num_threads()
    share = max(1, min(current, usable_cores()) // world_size)
    if share != current:
        torch.set_num_threads(share)
