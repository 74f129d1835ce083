"""Serve a shard on a unix socket until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import grpc
from grpc_reflection.v1alpha import reflection

from legato.common.errors import EndpointInUse
from legato.common.options import ServerOptions
from legato.common.sockets import claim_socket, remove_socket
from legato.pb import generate_pb2 as pb
from legato.pb import generate_pb2_grpc as pb_grpc
from legato.server.interceptor import ExceptionInterceptor
from legato.server.legacy.older import add_older_contracts
from legato.server.stream import StepStreamService
from legato.server.tracing import ShardSpans

logger = logging.getLogger(__name__)

FLAG = "--uds-path"
# Seconds for the last spans to reach the collector.
LAST_SPANS = 0.5
UNLIMITED_MESSAGES = [("grpc.max_send_message_length", 2**31 - 1), ("grpc.max_receive_message_length", 2**31 - 1)]


def socket_paths(options: ServerOptions) -> list[str]:
    """Of all shards, in the order of their ranks."""
    return [os.path.abspath(f"{options.uds_path}-{rank}") for rank in range(options.world_size)]


def socket_urls(options: ServerOptions) -> list[str]:
    """The same as gRPC names them, for `ServiceDiscovery`."""
    return [f"unix://{path}" for path in socket_paths(options)]


async def serve(service: StepStreamService, path: str, spans: ShardSpans | None = None) -> None:
    """`spans` only if calls and steps are traced."""
    service.spans = spans
    server = await listen(service, path)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stopping.set)
    logger.info("Server started", extra={"fields": {"socket": path}})
    await stopping.wait()
    await service.stop()
    await server.stop(grace=1.0)
    if spans is not None:
        await asyncio.to_thread(spans.close, LAST_SPANS)
    remove_socket(path, FLAG)


async def listen(service: StepStreamService, path: str) -> grpc.aio.Server:
    # The outermost first: a call that is refused has a span with its status.
    interceptors = [ExceptionInterceptor()] if service.spans is None else [service.spans, ExceptionInterceptor()]
    server = grpc.aio.server(interceptors=interceptors, options=UNLIMITED_MESSAGES)
    pb_grpc.add_TextGenerationServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated
    name = pb.DESCRIPTOR.services_by_name["TextGenerationService"].full_name
    older = add_older_contracts(service, server)
    reflection.enable_server_reflection((name, *older, reflection.SERVICE_NAME), server)
    claim_socket(path, FLAG)  # again: gRPC would take the path away from a server that came while we were loading
    old_mask = os.umask(0o177)  # the socket is made with mode 0600: only this user may drive the model
    try:
        server.add_insecure_port(f"unix://{path}")
        await server.start()
    except RuntimeError:
        raise EndpointInUse(f"{FLAG}: cannot listen on {path}") from None
    finally:
        os.umask(old_mask)
    return server
