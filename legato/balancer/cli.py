"""`legato route`: starts the balancer, and shuts it down gracefully."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from legato.balancer.app import Balancer
from legato.balancer.options import BalancerOptions, RouteOptions
from legato.balancer.replicas import ReplicaSet, ReplicaUrl
from legato.common.errors import OptionError
from legato.common.exposure import command_line_warnings, tls_context
from legato.common.gc import freeze_gc
from legato.common.logging import setup
from legato.common.program import command, run_program
from legato.common.progress import LISTENING
from legato.common.sockets import browser_url
from legato.http.server import HttpServer
from legato.router.listening import Listeners

logger = logging.getLogger(__name__)


# What goes on beside the server as long as it runs; an error of it ends the server.
Companion = Callable[[ReplicaSet], Coroutine[Any, Any, None]]


def run(options: RouteOptions) -> None:
    prepare(options)
    discovery = options.discovery
    if discovery is None:
        run_balancer(options, options.urls)
    else:
        discovery.connect()
        run_balancer(options, (), discovery.run)


def prepare(options: BalancerOptions) -> None:
    setup(options.logger_level, options.json_output, "legato-route")
    for warning in (*options.warnings, *command_line_warnings()):
        logger.warning(warning)


def run_balancer(options: BalancerOptions, urls: Iterable[ReplicaUrl], *companions: Companion) -> None:
    """Until a signal or an error of a companion, which it raises."""
    listeners = Listeners(options.hostname, options.port, 1)
    tls = tls_context(options.ssl_certfile, options.ssl_keyfile)
    import uvloop

    uvloop.run(serve(options, urls, companions, listeners, tls, replica_tls(options.replica_ca)))


def replica_tls(authorities: str | None) -> ssl.SSLContext:
    """For connections to replicas whose URLs say so."""
    try:
        context = ssl.create_default_context(cafile=authorities)
    except (OSError, ssl.SSLError) as error:
        raise OptionError(f"--replica-ca {authorities}: not certificates in PEM format ({error})") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


async def serve(
    options: BalancerOptions,
    urls: Iterable[ReplicaUrl],
    companions: Iterable[Companion],
    listeners: Listeners,
    tls: ssl.SSLContext | None,
    upstream: ssl.SSLContext,
) -> None:
    replicas = ReplicaSet(upstream)
    balancer = Balancer(options, replicas)
    replicas.update(urls)
    server = HttpServer(balancer, options.graceful_termination_timeout, options.payload_limit, tls=tls)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    listeners.listen()
    freeze_gc()
    url = browser_url(listeners.host, listeners.port, tls=tls is not None)
    fields = {"address": url, "replicas": len(replicas), "policy": options.policy}
    logger.info(LISTENING, extra={"fields": fields})
    tasks = [asyncio.create_task(companion(replicas)) for companion in companions]
    for task in tasks:
        task.add_done_callback(lambda _: stop())
    await server.serve(sockets=listeners.sockets)
    balancer.probes.close()
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()


COMMAND = command(
    RouteOptions, run, "route", "One endpoint for several servers, chosen by load and prefix cache contents."
)


def main(args: list[str] | None = None) -> Any:
    sys.exit(run_program(COMMAND, args))


if __name__ == "__main__":
    main()
