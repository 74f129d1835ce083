"""`legato route`: starts the balancer and stops it in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import sys
from typing import Any

from legato.balancer.app import Balancer
from legato.balancer.options import RouteOptions
from legato.balancer.probing import DnsDiscovery
from legato.balancer.replicas import ReplicaSet
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


def run(options: RouteOptions) -> None:
    setup(options.logger_level, options.json_output, "legato-route")
    for warning in (*options.warnings, *command_line_warnings()):
        logger.warning(warning)
    listeners = Listeners(options.hostname, options.port, 1)
    tls = tls_context(options.ssl_certfile, options.ssl_keyfile)
    import uvloop

    uvloop.run(serve(options, listeners, tls, replica_tls(options.replica_ca)))


def replica_tls(authorities: str | None) -> ssl.SSLContext:
    """For connections to replicas whose URLs say so."""
    try:
        context = ssl.create_default_context(cafile=authorities)
    except (OSError, ssl.SSLError) as error:
        raise OptionError(f"--replica-ca {authorities}: not certificates in PEM format ({error})") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


async def serve(
    options: RouteOptions, listeners: Listeners, tls: ssl.SSLContext | None, upstream: ssl.SSLContext
) -> None:
    replicas = ReplicaSet(upstream)
    balancer = Balancer(options, replicas)
    replicas.update(options.urls)
    discovery = None
    if options.discover is not None:
        discovery = asyncio.create_task(DnsDiscovery(options.discover).run(replicas))
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
    await server.serve(sockets=listeners.sockets)
    balancer.probes.close()
    if discovery is not None:
        discovery.cancel()


COMMAND = command(
    RouteOptions, run, "route", "One endpoint for several servers, chosen by load and by what their caches hold."
)


def main(args: list[str] | None = None) -> Any:
    sys.exit(run_program(COMMAND, args))


if __name__ == "__main__":
    main()
