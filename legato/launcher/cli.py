"""text-generation-launcher: downloads the model, then starts, supervises and stops shards and router."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from legato.cluster.connecting import LinkTarget
from legato.cluster.layout import RankLayout
from legato.common import logging as logs
from legato.common.errors import OptionError
from legato.common.exposure import command_line_warnings, tls_context
from legato.common.frontend import vertex_port
from legato.common.options import DEFAULT_MODEL, LauncherOptions
from legato.common.program import command, run_program
from legato.common.progress import LISTENING
from legato.common.sockets import browser_url, free_port, is_answered, is_own_socket
from legato.common.tgi_variables import variable_warnings
from legato.launcher import endpoints, environment, nodes, ranks, sizing, startup
from legato.launcher.follower import Follower
from legato.launcher.plan import LaunchPlan, make_plan, on_port, shard_group
from legato.launcher.processes import SAME_SIGNAL_SECONDS, Child, ChildFailed, ProcessCommand, Supervisor
from legato.launcher.supervision import ServerProcesses, Tell
from legato.modelfiles.cache import cache_folder
from legato.modelfiles.index import is_cached

logger = logging.getLogger(__name__)

# Requests get all of --graceful-termination-timeout. Then the router needs a moment to send their errors and exit.
EXIT_SECONDS = 3.0
DOWNLOAD_EXIT_SECONDS = 10.0
READY_INTERVAL = 0.05
WAITING_LOG_INTERVAL = 10.0


def serve(options: LauncherOptions) -> int:
    """Run all processes until a signal or a failure ends them."""
    logs.setup(options.logger_level, options.json_output, "launcher")
    if options.env:
        logger.info("Environment", extra={"fields": environment.facts()})
    for warning in (*options.warnings, *command_line_warnings(), *variable_warnings(os.environ)):
        logger.warning(warning)
    tls_context(options.ssl_certfile, options.ssl_keyfile)  # before the model is loaded
    sizing.check_limits(options)
    options = ranks.placed(options, os.environ)
    layout = ranks.layout_of(options, _num_shards(options))
    if options.node_rank == 0:
        # The router reads the variable, too; here its port is checked, and asked whether the server is ready.
        port = vertex_port(os.environ) or options.port
        options = replace(options, hostname=sizing.listen_address(options.hostname), port=port)
        endpoints.check_port(options.hostname, options.port)
    with (
        endpoints.socket_path(options.shard_uds_path if "shard_uds_path" in options.given else None) as path,
        endpoints.claim_sockets(path, layout.world_size) as sockets,
    ):
        options = replace(options, shard_uds_path=path)
        plan = make_plan(options, sockets, os.environ, layout)
        return asyncio.run(launch(plan, options, sockets, layout))


async def launch(plan: LaunchPlan, options: LauncherOptions, sockets: list[str], layout: RankLayout) -> int:
    """Start and supervise the processes. Returns the exit code; raises ChildFailed if one of them dies."""
    with Supervisor() as supervisor:
        if plan.download is not None and not _is_cached(options):
            code = await _download(supervisor, supervisor.start(plan.download))
            if code is not None:
                return code
        if options.node_rank > 0:
            dead = await _follow(supervisor, plan, options, sockets, layout)
        else:
            dead = await _lead(supervisor, plan, options, sockets, layout)
        if dead is not None:
            raise ChildFailed(dead.describe_exit())
        logger.info("Stopped")
        return supervisor.exit_code


async def _lead(
    supervisor: Supervisor, plan: LaunchPlan, options: LauncherOptions, sockets: list[str], layout: RankLayout
) -> Child | None:
    """The only machine, or the first one. Returns the child that ended the server."""
    logger.info("Starting shards and router", extra={"fields": {"num_shard": len(plan.shards)}})
    hub = None if layout.num_nodes == 1 else await _open_hub(options, layout)

    async def shard_commands() -> list[ProcessCommand]:
        commands = shard_group(plan, options, layout, nodes.alone() if hub is None else await hub.assemble())
        may_choose = not (layout.needs_links or options.given & {"master_addr", "master_port"})
        return on_port(commands, free_port()) if may_choose else commands

    processes = ServerProcesses(
        supervisor,
        plan,
        options.max_restarts,
        options.hang_timeout,
        options.load_timeout,
        remove_sockets=lambda: endpoints.remove_sockets(sockets),
        startup=lambda tell: _log_startup(options, sockets, len(plan.shards), tell),
        ready_again=lambda tell: _log_restart(options, sockets, len(plan.shards), tell),
        shard_commands=shard_commands if layout.world_size > 1 else None,
        waits=layout.needs_links,
        machine_loss=lambda: None if hub is None else hub.loss,
    )
    if hub is not None:
        hub.on_lost = processes.lose_machine
    # When this returns the progress bars are gone, so the stderr of a child can be printed.
    dead = await processes.run()
    # Once a child is dead no request can finish.
    grace = EXIT_SECONDS + (options.graceful_termination_timeout if dead is None else 0)
    if dead is not None:
        dead.show_stderr()
    if dead is None and not processes.shards.is_complete:
        # They will not be started again: the router ends requests at once, with an error, when it is asked twice.
        for child in processes.router.children:
            child.terminate()
        await asyncio.sleep(SAME_SIGNAL_SECONDS + 0.1)
    await supervisor.stop(*processes.router.children, grace=grace)
    if hub is not None:
        await hub.stop()
    await supervisor.stop(*processes.shards.children, grace=grace)
    return dead


async def _follow(
    supervisor: Supervisor, plan: LaunchPlan, options: LauncherOptions, sockets: list[str], layout: RankLayout
) -> Child | None:
    """Any machine but the first. Returns the child that ended it."""
    follower = Follower(
        supervisor,
        lambda assembly: shard_group(plan, options, layout, assembly),
        remove_sockets=lambda: endpoints.remove_sockets(sockets),
        max_restarts=options.max_restarts,
        load_timeout=options.load_timeout,
    )
    key, tls = str(options.cluster_key).encode(), ranks.link_tls(options)
    target = LinkTarget(options.master_addr, options.master_port, key, options.node_addr, tls)
    with startup.lines():
        dead = await follower.run(target, options.node_rank, nodes.about(options, layout))
    await supervisor.stop(*(child for child in follower.children if child.is_running), grace=EXIT_SECONDS)
    return dead


async def _open_hub(options: LauncherOptions, layout: RankLayout) -> nodes.NodeHub:
    address = options.node_addr or await nodes.resolve_own(options.master_addr, options.master_port)
    key, about = str(options.cluster_key).encode(), nodes.about(options, layout)
    return nodes.NodeHub(address, options.master_port, key, layout.num_nodes, about, ranks.link_tls(options))


def _is_cached(options: LauncherOptions) -> bool:
    """Whether a process that looks for downloads would find nothing to do, which takes it most of a second."""
    cache = Path(options.huggingface_hub_cache) if options.huggingface_hub_cache else None
    return options.weights_cache_override is None and is_cached(options.model_id, cache_folder(cache))


async def _download(supervisor: Supervisor, child: Child) -> int | None:
    """Wait for the download. Returns an exit code if the launcher must end: after a signal or a failed download."""
    if await supervisor.first_exit(child) is None:
        await supervisor.stop(child, grace=DOWNLOAD_EXIT_SECONDS)
        return supervisor.exit_code
    code = child.exited.result()
    if code < 0:
        raise ChildFailed(child.describe_exit())
    # The child has written the error to our stderr.
    return code or None


async def _log_startup(options: LauncherOptions, sockets: list[str], num_local: int, tell: Tell) -> None:
    """Log when each shard is ready, and when the router answers at which address."""
    start = time.monotonic()
    # Only one line names the address: ours, because the router does not know when everything is ready.
    logging.getLogger().handlers[0].addFilter(lambda record: record.msg != LISTENING)
    with startup.relayed(tell, num_local), startup.shown(options.json_output):
        await asyncio.gather(*(_log_shard_ready(rank, path, start) for rank, path in enumerate(sockets)))
        await _until_ready(options, sockets)
    logger.info("Connected")
    url = browser_url(options.hostname, options.port, tls=options.ssl_certfile is not None)
    fields = {"model": options.model_id or DEFAULT_MODEL, "docs": f"{url}/docs"}
    logger.info("Listening on %s, ready in %.1f s", url, time.monotonic() - start, extra={"fields": fields})


async def _log_restart(options: LauncherOptions, sockets: list[str], num_local: int, tell: Tell) -> None:
    with startup.relayed(tell, num_local), startup.lines():
        await _until_ready(options, sockets)


async def _until_ready(options: LauncherOptions, sockets: list[str]) -> None:
    """Until the shards listen and the router, which knows whether tokens come from them, says so."""
    while not all(map(is_answered, sockets)):
        await asyncio.sleep(READY_INTERVAL)
    tls = options.ssl_certfile is not None
    while not await endpoints.is_healthy(options.hostname, options.port, tls=tls):
        await asyncio.sleep(READY_INTERVAL)


async def _log_shard_ready(rank: int, path: str, start: float) -> None:
    last_log = start
    while not is_own_socket(path):
        await asyncio.sleep(READY_INTERVAL)
        if time.monotonic() - last_log > WAITING_LOG_INTERVAL:
            last_log = time.monotonic()
            logger.info("Waiting for shard", extra={"fields": {"rank": rank}})
    logger.info("Shard ready in %.1f s", time.monotonic() - start, extra={"fields": {"rank": rank}})


def _num_shards(options: LauncherOptions) -> int:
    devices = None
    if options.task == "embed":
        if options.sharded or (options.num_shard or 1) > 1:
            raise OptionError("--task embed runs on one device: use --num-shard 1, and a server for each device")
        return 1
    if options.num_shard is None and options.sharded is not False:
        devices = sizing.num_devices(os.environ, sizing.installed_gpus)
    return sizing.num_shards(options.sharded, options.num_shard, devices)


COMMAND = command(
    LauncherOptions,
    serve,
    "text-generation-launcher",
    "Download a model and serve it.",
)


def main() -> None:
    sys.exit(run_program(COMMAND))


if __name__ == "__main__":
    main()
