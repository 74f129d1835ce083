"""text-generation-launcher: options → download → shards and router together → watch → stop in order."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from dataclasses import replace

from legato.common import logging as logs
from legato.common.options import LauncherOptions
from legato.common.program import command, run_program
from legato.launcher import endpoints, sizing, startup
from legato.launcher.plan import Plan, make_plan
from legato.launcher.processes import Child, ChildFailed, Supervisor

logger = logging.getLogger(__name__)

# Once a child is dead no request can finish: the others get only the time to leave in order.
CRASH_GRACE = 3.0
DOWNLOAD_GRACE = 10.0
READY_INTERVAL = 0.05
PATIENCE_INTERVAL = 10.0


def serve(options: LauncherOptions) -> int:
    """Run everything that these options ask for, until a signal or a failure ends it."""
    if options.env:
        from legato.launcher.environment import describe

        print(describe())
        return 0
    logs.setup(options.logger_level, options.json_output, "launcher")
    for warning in options.warnings:
        logger.warning(warning)
    sizing.check_limits(options)
    options = replace(options, hostname=sizing.listen_address(options.hostname))
    endpoints.check_port(options.hostname, options.port)
    with endpoints.claim_sockets(options.shard_uds_path, _num_shards(options)) as sockets:
        return asyncio.run(launch(make_plan(options, sockets, os.environ), options, sockets))


async def launch(plan: Plan, options: LauncherOptions, sockets: list[str]) -> int:
    """Start the plan's programs and watch them. Returns the exit code; raises ChildFailed when one of them dies."""
    with Supervisor() as supervisor:
        if plan.download is not None:
            code = await _download(supervisor, supervisor.start(plan.download))
            if code is not None:
                return code
        logger.info("Starting shards and router", extra={"fields": {"num_shard": len(plan.shards)}})
        shards = [supervisor.start(shard) for shard in plan.shards]
        router = supervisor.start(plan.router)
        news = asyncio.ensure_future(_announce(options, sockets))
        dead = await supervisor.first_exit(*shards, router)
        news.cancel()
        # Nothing may be drawn any more when the stderr of a child is shown.
        await asyncio.wait([news])
        grace = options.graceful_termination_timeout if dead is None else CRASH_GRACE
        if dead is not None:
            _show_stderr(dead)
        await supervisor.stop(router, grace=grace)
        await supervisor.stop(*shards, grace=grace)
        if dead is not None:
            raise ChildFailed(dead.describe_exit())
        logger.info("Stopped")
        return 130 if supervisor.impatient else 0


async def _download(supervisor: Supervisor, child: Child) -> int | None:
    """Wait for the download. An exit code ends the launcher: a signal's, or that of a download that failed."""
    if await supervisor.first_exit(child) is None:
        await supervisor.stop(child, grace=DOWNLOAD_GRACE)
        return 130 if supervisor.impatient else 0
    code = child.exited.result()
    if code < 0:
        raise ChildFailed(child.describe_exit())
    # The child wrote to our stderr what went wrong; its code says the rest.
    return code or None


async def _announce(options: LauncherOptions, sockets: list[str]) -> None:
    """Say when each shard is ready and when the router answers."""
    start = time.monotonic()
    with startup.shown(options.json_output):
        await asyncio.gather(*(_announce_shard(rank, path, start) for rank, path in enumerate(sockets)))
        while not await endpoints.is_healthy(options.hostname, options.port):
            await asyncio.sleep(READY_INTERVAL)
    logger.info("Connected")
    address = endpoints.url(options.hostname, options.port)
    logger.info("Listening on %s, ready in %.1f s", address, time.monotonic() - start)


async def _announce_shard(rank: int, path: str, start: float) -> None:
    told = start
    while not endpoints.is_socket(path):
        await asyncio.sleep(READY_INTERVAL)
        if time.monotonic() - told > PATIENCE_INTERVAL:
            told = time.monotonic()
            logger.info("Waiting for shard", extra={"fields": {"rank": rank}})
    logger.info("Shard ready in %.1f s", time.monotonic() - start, extra={"fields": {"rank": rank}})


def _num_shards(options: LauncherOptions) -> int:
    devices = None
    if options.num_shard is None and options.sharded is not False:
        devices = sizing.num_devices(os.environ, sizing.installed_gpus)
    return sizing.num_shards(options.sharded, options.num_shard, devices)


def _show_stderr(child: Child) -> None:
    """What a failed child wrote to stderr. A single line is in the closing message already."""
    if len(child.stderr) > 1:
        print(*child.stderr, sep="\n", file=sys.stderr, flush=True)


COMMAND = command(LauncherOptions, serve, "text-generation-launcher", "Serve a model: download it, run it, watch it.")


def main() -> None:
    sys.exit(run_program(COMMAND))


if __name__ == "__main__":
    main()
