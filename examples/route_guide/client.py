"""A client that makes every kind of RPC, then handles an error, a deadline and a cancellation.

python examples/route_guide/client.py                                  # starts a server
python examples/route_guide/client.py --address unix:/tmp/route-guide  # uses a running one
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator

import grpc
import route_guide_pb2 as pb
import route_guide_pb2_grpc as rpc
from island import load_features, point
from server import serving
from service import RouteGuide

MILL, BRIDGE, _, _, INN, _ = (feature.location for feature in load_features())
OPEN_SEA = point(48.0, -29.0)
TIMEOUT = 5.0  # seconds; without it a call waits forever if the server hangs


async def walk(*points: pb.Point, pause: float = 0.0) -> AsyncIterator[pb.Point]:
    for step in points:
        yield step
        await asyncio.sleep(pause)


async def four_kinds(guide: rpc.RouteGuideStub) -> None:
    feature = await guide.GetFeature(MILL, timeout=TIMEOUT)
    print("unary:          you stand at", feature.name)

    async for feature in guide.ListFeatures(pb.Rectangle(corner=MILL, opposite=INN), timeout=TIMEOUT):
        print("server stream:  between mill and inn lies", feature.name)

    summary = await guide.RecordRoute(walk(MILL, BRIDGE, INN), timeout=TIMEOUT)
    print(f"client stream:  {summary.metres} m past {summary.num_features} features")

    chat = guide.RouteChat(timeout=TIMEOUT)
    for where, text in [(INN, "The soup is good."), (MILL, "Mind the geese."), (INN, "It is gone now.")]:
        await chat.write(pb.RouteNote(location=where, text=text))
    await chat.done_writing()
    async for note in chat:
        print("bidirectional: ", note.text)


async def three_ends(guide: rpc.RouteGuideStub) -> None:
    nothing_there = guide.GetFeature(OPEN_SEA, timeout=TIMEOUT)
    too_slow = guide.RecordRoute(walk(MILL, INN, pause=10), timeout=0.2)
    given_up = guide.RouteChat(timeout=TIMEOUT)
    given_up.cancel()
    for call in (nothing_there, too_slow, given_up):
        # Awaiting the call itself would raise AioRpcError, with the same code and details.
        print(f"{(await call.code()).name}: {await call.details()}")


async def tour(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        guide = rpc.RouteGuideStub(channel)  # type: ignore[no-untyped-call]  # generated
        await four_kinds(guide)
        await three_ends(guide)


async def tour_alone() -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/route-guide"
        async with serving(RouteGuide(load_features()), address):
            await tour(address)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the route guide everything it knows.")
    parser.add_argument("--address", help="a running server; without it the example starts its own")
    address = parser.parse_args().address
    try:
        asyncio.run(tour(address) if address else tour_alone())
    except grpc.aio.AioRpcError as error:
        raise SystemExit(f"--address {address}: {error.code().name}, {error.details()}") from None


if __name__ == "__main__":
    main()
