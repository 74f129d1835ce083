"""The route guide over a real socket: each kind of RPC, each way a call can end, and the example as it is run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import grpc
import pytest
import route_guide_pb2 as pb
import route_guide_pb2_grpc as rpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from island import load_features, metres_between, place, point
from server import serving
from service import NOTES_PER_FEATURE, RouteGuide

CLIENT = Path(__file__).parents[2] / "examples" / "route_guide" / "client.py"
FEATURES = load_features()
MILL, BRIDGE, WELL, STAIR, INN, ROCK = (feature.location for feature in FEATURES)
OPEN_SEA = point(48.0, -29.0)
NOWHERE = pb.Point(latitude=91_000_000, longitude=0)

Conversation = Callable[[rpc.RouteGuideStub, RouteGuide], Coroutine[None, None, None]]
Hold = Callable[[Conversation], None]


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    """Holds a conversation with a fresh server; seconds are bounded, because a hang is a failure here."""

    async def with_server(conversation: Conversation) -> None:
        address, guide = f"unix:{tmp_path}/guide", RouteGuide(FEATURES)
        async with serving(guide, address), grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
            await conversation(rpc.RouteGuideStub(channel), guide)

    return lambda conversation: asyncio.run(with_server(conversation))


async def route(*points: pb.Point, then_rest: float = 0.0) -> AsyncIterator[pb.Point]:
    for step in points:
        yield step
    await asyncio.sleep(then_rest)


def note(where: pb.Point, text: str) -> pb.RouteNote:
    return pb.RouteNote(location=where, text=text)


def test_unary_answers_with_the_feature(hold: Hold) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        assert (await stub.GetFeature(INN)).name == "Copper Kettle Inn"

    hold(conversation)


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [
        (OPEN_SEA, grpc.StatusCode.NOT_FOUND, "nothing at (48000000, -29000000)"),
        (NOWHERE, grpc.StatusCode.INVALID_ARGUMENT, "(91000000, 0) is no latitude and longitude"),
    ],
)
def test_an_error_has_a_status_and_names_the_point(
    hold: Hold, where: pb.Point, code: grpc.StatusCode, words: str
) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetFeature(where)
        assert caught.value.code() is code
        assert words in (caught.value.details() or "")

    hold(conversation)


@pytest.mark.parametrize(("corner", "opposite"), [(MILL, INN), (INN, MILL)])
def test_server_stream_lists_what_lies_inside_whichever_corner_comes_first(
    hold: Hold, corner: pb.Point, opposite: pb.Point
) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        found = [f.name async for f in stub.ListFeatures(pb.Rectangle(corner=corner, opposite=opposite))]
        assert found == ["Heron Mill", "Three Clocks Bridge", "Copper Kettle Inn"]

    hold(conversation)


def test_client_stream_is_summed_up(hold: Hold) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        summary = await stub.RecordRoute(route(MILL, OPEN_SEA, ROCK))
        assert (summary.num_points, summary.num_features) == (3, 2)
        assert summary.metres == round(metres_between(MILL, OPEN_SEA) + metres_between(OPEN_SEA, ROCK))

    hold(conversation)


def test_an_empty_route_has_an_empty_summary(hold: Hold) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        summary = await stub.RecordRoute(route())
        assert (summary.num_points, summary.num_features, summary.metres) == (0, 0, 0)

    hold(conversation)


def test_a_bad_point_ends_a_client_stream_that_is_under_way(hold: Hold) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        call = stub.RecordRoute(route(MILL, NOWHERE, then_rest=60))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    hold(conversation)


def test_chat_answers_before_the_caller_has_finished(hold: Hold) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        chat = stub.RouteChat()
        for message in [note(WELL, "first"), note(ROCK, "elsewhere"), note(WELL, "second")]:
            await chat.write(message)
        assert (await chat.read()).text == "first"
        await chat.write(note(WELL, "third"))
        assert [(await chat.read()).text for _ in range(2)] == ["first", "second"]

    hold(conversation)


def test_a_chat_reads_the_notes_of_earlier_chats_but_only_the_latest(hold: Hold) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        texts = [str(n) for n in range(NOTES_PER_FEATURE + 3)]
        async for _ in stub.RouteChat(iter([note(STAIR, text) for text in texts])):
            pass
        heard = [n.text async for n in stub.RouteChat(iter([note(STAIR, "mine")]))]
        assert heard == texts[-NOTES_PER_FEATURE:]

    hold(conversation)


def test_a_deadline_ends_the_call(hold: Hold) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        call = stub.RecordRoute(route(MILL, then_rest=60), timeout=0.1)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    hold(conversation)


def test_a_cancelled_chat_gives_back_what_it_held(hold: Hold) -> None:
    async def conversation(stub: rpc.RouteGuideStub, guide: RouteGuide) -> None:
        chat = stub.RouteChat()
        await chat.write(note(WELL, "anybody here?"))
        while guide.num_chats == 0:
            await asyncio.sleep(0.01)
        chat.cancel()
        assert await chat.code() is grpc.StatusCode.CANCELLED
        while guide.num_chats > 0:
            await asyncio.sleep(0.01)

    hold(conversation)


def test_reflection_names_the_service(tmp_path: Path) -> None:
    async def services() -> list[str]:
        address = f"unix:{tmp_path}/guide"
        async with serving(RouteGuide([]), address), grpc.aio.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            answers = [answer async for answer in stub.ServerReflectionInfo(iter([question]))]
            return [service.name for answer in answers for service in answer.list_services_response.service]

    assert "route_guide.v1.RouteGuide" in asyncio.run(services())


def test_distances_agree_with_the_length_of_a_degree() -> None:
    assert metres_between(point(10, 20), point(11, 20)) == pytest.approx(111_195, abs=1)
    assert metres_between(point(60, 20), point(60, 21)) == pytest.approx(111_195 / 2, rel=1e-4)


def test_every_feature_has_a_place_of_its_own() -> None:
    assert len({place(feature.location) for feature in FEATURES}) == len(FEATURES) > 0


def run_client(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CLIENT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_client_runs_alone_from_start_to_end() -> None:
    done = run_client()
    assert done.returncode == 0, done.stderr
    for words in [
        "unary:          you stand at Heron Mill",
        "server stream:  between mill and inn lies Three Clocks Bridge",
        "client stream:  1351 m past 3 features",
        "bidirectional:  The soup is good.",
        "NOT_FOUND: the map shows nothing",
        "DEADLINE_EXCEEDED",
        "CANCELLED",
    ]:
        assert words in done.stdout


def test_the_client_says_in_one_line_that_nobody_answers(tmp_path: Path) -> None:
    done = run_client("--address", f"unix:{tmp_path}/nobody")
    assert done.returncode == 1
    assert done.stderr.startswith(f"--address unix:{tmp_path}/nobody: UNAVAILABLE")
    assert "Traceback" not in done.stderr
