"""Responses that are stored: references to their items, their events, their bounds."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from legato.api.responses.events import ResponseInProgress
from legato.common.errors import OptionError
from legato.http import sse
from legato.http.routes.responses.routes import _response_decoder
from legato.http.routes.responses.store import ResponseStore, StoredResponse, this_process
from legato.http.sse import named_event
from legato.router.response_store import check_store, response_store
from tests.http.asgi import Call, get, post, until
from tests.http.routes.agents.machines import events_of
from tests.http.routes.agents.test_responses import KEYS, PATH, rendered, response, server_for
from tests.http.test_server import TIMEOUT, running

CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "look"}]


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


def test_a_reference_stands_for_an_item_of_an_earlier_response() -> None:
    """As Vercel's SDK sends them by default."""

    async def main() -> None:
        server = server_for(CALL)
        first = (await post(server.app, PATH, {"input": "hi", "tools": TOOLS})).json()
        thought, call = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}
        user = {"role": "user", "content": "hi"}
        given = [user, reference(thought), reference(call), result]
        second = (await post(server.app, PATH, {"input": given, "tools": TOOLS})).json()
        _, assistant, tool = rendered(server)
        assert (assistant["reasoning_content"], assistant["tool_calls"][0]["id"]) == ("hm", call["call_id"])
        assert tool["content"] == "seen"
        items = (await get(server.app, f"{PATH}/{second['id']}/input_items")).json()["data"]
        assert [item["type"] for item in items[:3]] == ["function_call_output", "function_call", "reasoning"]

    asyncio.run(main())


def test_only_stored_items_of_the_same_key_can_be_referred_to_and_only_once() -> None:
    async def ask(app: ASGIApp, key: str, given: Any, **fields: Any) -> Any:
        return await post(app, PATH, {"input": given, **fields}, {"authorization": f"Bearer {key}"})

    async def main() -> None:
        app = server_for(**KEYS).app
        (item,) = (await ask(app, "one", "hi")).json()["output"]
        user = {"role": "user", "content": "Sure?"}
        assert (await ask(app, "one", [reference(item), user])).status == 200
        refused = await ask(app, "two", [reference(item), user])
        assert refused.status == 404 and item["id"] in refused.json()["error"]["message"]
        assert (await ask(app, "one", [reference(item), reference(item)])).status == 400
        assert (await ask(app, "one", [{"type": "item_reference"}])).json()["error"]["param"] == "input[0].id"
        unstored = (await ask(app, "one", "hi", store=False)).json()
        assert (await ask(app, "one", [reference(unstored["output"][0]), user])).status == 404

    asyncio.run(main())


def test_items_are_dropped_with_their_response(tmp_path: Path) -> None:
    async def main() -> None:
        store = ResponseStore(str(tmp_path / "file.sqlite"), 1000)
        body = json.dumps({"output": [{"id": "msg_1", "type": "message"}]}).encode()
        for deleted in (True, False):
            await store.put("", StoredResponse("resp_first", b"[]", body))
            assert list(await store.items("", ["msg_1", "msg_2"], 1000)) == ["msg_1"]
            assert await store.items("", ["msg_1"], len(body) - 1) == {}
            if deleted:
                await store.delete("", "resp_first")
            else:
                await store.put("", response(2, size=990))
            assert await store.items("", ["msg_1"], 1000) == {}
        store.close()

    asyncio.run(main())


def test_events_count_and_responses_that_are_growing_are_dropped_last(tmp_path: Path) -> None:
    async def main() -> None:
        store = ResponseStore(str(tmp_path / "file.sqlite"), 1000)
        growing = StoredResponse("resp_growing", b"[]", b'{"output":[]}', owner=this_process())
        await store.put("", growing)
        await store.put("", response(1, size=300))
        await store.add_event("resp_growing", 0, b"x" * 600)
        assert await store.get("", "resp_1") is not None
        await store.add_event("resp_growing", 64, b"x" * 300)
        assert await store.get("", "resp_1") is None and await store.is_running("resp_growing")
        await store.add_event("resp_growing", 128, b"x" * 300)  # alone it is too large
        assert not await store.is_running("resp_growing")
        await store.add_event("resp_growing", 129, b"x")
        assert await store.events("resp_growing", -1) == []
        store.close()

    asyncio.run(main())


def test_a_stream_whose_process_is_gone_ends_with_its_failure(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "file.sqlite")
        server = server_for(response_store=path)
        body = (await post(server.app, PATH, {"input": "hi"})).json() | {"status": "in_progress", "output": []}
        place = f"{PATH}/{body['id']}"
        store = ResponseStore(path, 1 << 20)
        await store.put("", StoredResponse(body["id"], b"[]", json.dumps(body).encode(), owner="1:0"))
        progress = ResponseInProgress(sequence_number=4, response=_response_decoder.decode(json.dumps(body)))
        await store.add_event(body["id"], 7, named_event(progress) + sse.KEEP_ALIVE)
        following = Call(server.app, "GET", place, query="stream=true")
        answer = await asyncio.wait_for(following.answer(), 10)
        _, last = events_of(answer.body)
        assert (last["type"], last["sequence_number"]) == ("response.failed", 5)
        assert (await get(server.app, place)).json() == last["response"]
        store.close()

    asyncio.run(main())


def test_a_response_in_the_background_says_that_it_runs_and_is_continued_when_it_is_complete() -> None:
    async def main() -> None:
        server = server_for()
        server.backend.pause_after = 1
        started = (await post(server.app, PATH, {"input": "hi", "background": True})).json()
        await until(lambda: server.backend.requests)
        place = f"{PATH}/{started['id']}"
        assert (await get(server.app, place)).json()["status"] == "in_progress"
        refused = await post(server.app, PATH, {"input": "go on", "previous_response_id": started["id"]})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "previous_response_id")
        server.backend.go_on.set()
        while (await get(server.app, place)).json()["status"] == "in_progress":
            await asyncio.sleep(0.01)
        answer = await post(server.app, PATH, {"input": "go on", "previous_response_id": started["id"]})
        assert answer.status == 200
        assert [message["content"] for message in rendered(server)] == ["hi", "hello", "go on"]

    asyncio.run(main())


def test_who_starts_and_follows_a_stream_in_the_background_gets_its_events_from_the_store() -> None:
    """On the connection that started it, which could write them at once: nobody else would ever get them."""
    app = server_for("the quick brown fox jumps over the lazy dog").app
    with running(app) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
        connection.request("POST", PATH, json.dumps({"input": "hi", "background": True, "stream": True}))
        events = events_of(connection.getresponse().read())
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        connection.request("GET", f"{PATH}/{events[0]['response']['id']}?stream=true")
        assert events_of(connection.getresponse().read()) == events
        connection.close()


def test_tokens_are_counted_as_they_are_billed() -> None:
    async def main() -> None:
        server = server_for()
        first = (await post(server.app, PATH, {"input": "hi", "instructions": "Be brief."})).json()
        body = {"input": "go on", "tools": TOOLS, "previous_response_id": first["id"]}
        counted = (await post(server.app, f"{PATH}/input_tokens", body)).json()
        usage = (await post(server.app, PATH, body)).json()["usage"]
        assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
        assert counted["input_tokens"] > first["usage"]["input_tokens"]
        assert (await post(server.app, f"{PATH}/input_tokens", {"input": []})).status == 400

    asyncio.run(main())


def test_a_response_that_is_larger_than_the_store_does_not_start_in_the_background() -> None:
    async def main() -> None:
        server = server_for(response_store_size=100)
        refused = await post(server.app, PATH, {"input": "hi", "background": True})
        assert refused.status == 400 and "--response-store-size" in refused.json()["error"]["message"]
        assert not server.backend.requests

    asyncio.run(main())


@pytest.mark.parametrize("content", [b"this is no database" * 100, None])
def test_a_file_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "responses.sqlite"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=r"--response-store: .*responses\.sqlite"):
        check_store(str(file), 1000)


def test_a_new_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    check_store(str(tmp_path / "new.sqlite"), 1000)
    with response_store(str(tmp_path / "new.sqlite"), 1000) as path:
        assert path is not None and Path(path).stat().st_mode & 0o777 == 0o600


def test_the_memory_of_a_router_that_lives_stays_and_that_of_a_killed_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they run in two containers, where neither knows the other's process number."""
    monkeypatch.setattr("legato.router.response_store._MEMORY", tmp_path)
    program = "import time; from pathlib import Path; import legato.router.response_store as store\n"
    program += f"store._MEMORY = Path({str(tmp_path)!r})\n"
    program += "with store.response_store(None, 1) as path:\n"
    program += "    Path(path).touch(); print(path, flush=True); time.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        real, hidden = Path.exists, Path(f"/proc/{other.pid}")
        monkeypatch.setattr(Path, "exists", lambda path: path != hidden and real(path))  # as in another container
        with response_store(None, 1) as ours:
            assert ours is not None and theirs.exists()
            assert Path(ours).parent.stat().st_mode & 0o777 == 0o700
        assert not Path(ours).parent.exists()
        other.kill()
    assert theirs.exists()
    with response_store(None, 1):
        assert not theirs.parent.exists()
    assert not list(tmp_path.iterdir())
