"""`python -m legato.cluster.relay`: unix sockets on the first machine in place of the shards on the others.

The router connects to them as to shards beside it; every connection goes through an authenticated tunnel. The relay
stands for the remote shards: it ends when it loses one of them, and whoever kills it ends them, because the launchers
start all shards of a model anew when one of their children has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from dataclasses import dataclass

from legato.cluster.connecting import LinkTarget, call, call_until_there, describe
from legato.cluster.network import TUNNEL, WATCH
from legato.cluster.tls import LinkTls
from legato.cluster.tunnels import pipe, wait_until_closed
from legato.common.errors import LegatoError
from legato.common.logging import setup
from legato.common.option import option
from legato.common.options import LogOptions
from legato.common.program import command, run_program
from legato.common.sockets import claim_socket

logger = logging.getLogger("legato.cluster.relay")  # which runs as __main__


class RemoteShardLost(LegatoError):
    """A shard on another machine has ended, or cannot be reached any more."""


@dataclass(frozen=True, kw_only=True)
class RelayOptions(LogOptions):
    """Relay"""

    uds_path: str = option("", "Unix socket path prefix to listen on; `-RANK` is appended.", env=None)
    remote: tuple[str, ...] = option((), "RANK=ADDRESS=PORT of each remote shard.", env=None)
    source: str = option("", "Address of this machine to connect from.", env=None)
    group_id: str = option("", "Start of the shards that is served.", env=None)
    cluster_key: str = option("", "The shared secret.", secret=True)
    cluster_certfile: str | None = option(None, "Certificate of this machine.", env=None)
    cluster_keyfile: str | None = option(None, "Its private key.", env=None)
    cluster_cafile: str | None = option(None, "Authority of the other machines' certificates.", env=None)

    @property
    def tls(self) -> LinkTls | None:
        return LinkTls.of(self.cluster_certfile, self.cluster_keyfile, self.cluster_cafile)

    def target(self, address: str, port: int) -> LinkTarget:
        return LinkTarget(address, port, self.cluster_key.encode(), self.source or None, self.tls)


def run(options: RelayOptions) -> None:
    setup(options.logger_level, options.json_output, "relay")
    asyncio.run(serve(options))


async def serve(options: RelayOptions) -> None:
    remotes = [remote.split("=") for remote in options.remote]
    tasks = [
        asyncio.ensure_future(_stand_for(int(rank), options.target(address, int(port)), options))
        for rank, address, port in remotes
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _stand_for(rank: int, target: LinkTarget, options: RelayOptions) -> None:
    """Until the shard is lost."""
    watched = await call_until_there(target, {"group": options.group_id, "purpose": WATCH})
    end = asyncio.ensure_future(wait_until_closed(watched))
    serving = asyncio.ensure_future(_serve_socket(rank, target, options))
    await asyncio.wait([end, serving], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    raise RemoteShardLost(f"lost shard {rank} on {target.address}")


async def _serve_socket(rank: int, target: LinkTarget, options: RelayOptions) -> None:
    """The socket appears when the remote shard serves, as it would if the shard were here."""
    loop, hello = asyncio.get_running_loop(), {"group": options.group_id, "purpose": TUNNEL}
    (await call_until_there(target, hello)).close()
    path = f"{options.uds_path}-{rank}"
    claim_socket(path, "--uds-path")
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    old_mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(old_mask)
    listener.listen(64)
    logger.info("Connected to shard %d on another machine", rank, extra={"fields": {"address": target.address}})
    tunnels: set[asyncio.Task[None]] = set()
    while True:
        connection, _ = await loop.sock_accept(listener)
        connection.setblocking(False)
        task = asyncio.ensure_future(_tunnel(connection, target, hello))
        tunnels.add(task)
        task.add_done_callback(tunnels.discard)


async def _tunnel(connection: socket.socket, target: LinkTarget, hello: dict[str, str]) -> None:
    try:
        there = await call(target, hello)
    except (OSError, TimeoutError, LegatoError) as error:
        # Whoever called sees that the shard is not there, whatever the reason: a certificate may have expired since.
        logger.warning("A call to a shard on another machine failed", extra={"fields": {"problem": describe(error)}})
        connection.close()
    else:
        await pipe(connection, there)


COMMAND = command(RelayOptions, run, "legato-relay", "Unix sockets that forward to shards on other machines.")

if __name__ == "__main__":
    sys.exit(run_program(COMMAND))
