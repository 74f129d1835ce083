"""Runs the route guide.

python examples/route_guide/server.py --address unix:/tmp/route-guide
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import route_guide_pb2 as pb
import route_guide_pb2_grpc as rpc
from grpc_reflection.v1alpha import reflection
from island import load_features
from service import RouteGuide

DEFAULT_ADDRESS = "unix:/tmp/route-guide"
GRACE_SECONDS = 1.0  # for calls in progress when the server stops


@contextlib.asynccontextmanager
async def serving(guide: RouteGuide, address: str) -> AsyncIterator[None]:
    """Serve at `address` inside the block: `unix:/some/path` or `host:port`."""
    # By default gRPC lets two servers share a port, and a forgotten one would get every other call.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    rpc.add_RouteGuideServicer_to_server(guide, server)  # type: ignore[no-untyped-call]  # generated
    # With reflection, tools such as grpcurl need no copy of the proto file.
    service = pb.DESCRIPTOR.services_by_name["RouteGuide"].full_name
    reflection.enable_server_reflection([service, reflection.SERVICE_NAME], server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(GRACE_SECONDS)


async def serve(address: str) -> None:
    async with serving(RouteGuide(load_features()), address):
        print(f"route guide at {address}; Ctrl-C stops it", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the map of a small island.")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="unix:/some/path or host:port")
    address = parser.parse_args().address
    try:
        asyncio.run(serve(address))
    except KeyboardInterrupt:
        pass
    except RuntimeError:  # raised by gRPC if it cannot bind; its log has the reason
        raise SystemExit(f"--address {address}: cannot listen there, choose another") from None


if __name__ == "__main__":
    main()
