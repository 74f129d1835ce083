"""POST /v1/responses and the store below it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from legato.http.routes.responses.store import ResponseStore, StoredResponse
from legato.pb import generate_pb2 as pb
from legato.scheduling.state import FinishReason, Output
from tests.generation import parameters_of
from tests.http.asgi import Answer, Call, FakeBackend, call, get, outputs_of, post, until
from tests.http.routes.agents.machines import events_of
from tests.http.routes.agents.test_event_order import ROOMY
from tests.http.routes.openai.fakes import FakeTemplate, Server

PATH = "/v1/responses"
THINKS = "<think></think><tool_call>"
KEYS = {"api_keys": ("one", "two")}


def server_for(text: str = "hello", **settings: Any) -> Server:
    return Server(FakeBackend(lambda request: outputs_of(text), limits=ROOMY), FakeTemplate(text=THINKS), settings)


def ask(server: Server, given: Any = "hi", **fields: Any) -> Answer:
    return server.ask(PATH, {"input": given, **fields})


def rendered(server: Server) -> list[Any]:
    assert server.template is not None
    messages: list[Any] = server.template.asked[-1]["messages"]
    return messages


def test_items_become_messages_that_templates_know() -> None:
    server = server_for()
    answer = ask(
        server,
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "user", "content": "b"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
            {"type": "web_search_call", "id": "w"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
            {"role": "developer", "content": "Now hurry."},
        ],
        instructions="You are an agent.",
    )
    assert answer.status == 200, answer.body
    system, user, assistant, first, second, last = rendered(server)
    assert system == {"role": "system", "content": "You are an agent.\n\nBe brief."}
    assert user == {"role": "user", "content": "a\n\nb"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("Look:", "hm")
    assert [call["function"] for call in assistant["tool_calls"]] == [
        {"name": "look", "arguments": {"at": 1}},
        {"name": "patch", "arguments": {"input": "x"}},
    ]
    assert [first["content"], second["content"]] == ["ok", "done"]
    assert last == {"role": "user", "content": "Now hurry."}


def test_functions_of_a_namespace_are_called_by_both_names() -> None:
    call = '<tool_call>\n{"name": "files__open", "arguments": {}}\n</tool_call>'
    server = server_for(call)
    tools = [{"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "open"}]}]
    item = ask(server, tools=tools).json()["output"][-1]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "open", "files")
    back = [{"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}]
    assert ask(server, ["?", item, *back][1:], tools=tools).status == 200
    assert rendered(server)[0]["tool_calls"][0]["function"]["name"] == "files__open"


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "patch"}, "required"])
def test_a_custom_tool_that_is_asked_for_follows_its_grammar(choice: Any) -> None:
    server = server_for('<think>\nhm\n</think>\n\n{"input": 1}')
    format = {"type": "grammar", "syntax": "lark", "definition": "start: /.*/"}
    tools = [{"type": "custom", "name": "patch", "format": format}]
    answer = ask(server, tools=tools, tool_choice=choice).json()
    reasoning, call = answer["output"]
    assert (reasoning["type"], call["type"], call["input"]) == ("reasoning", "custom_tool_call", '{"input": 1}')
    parameters = parameters_of(server.backend.requests[0])
    assert (parameters.grammar_type, parameters.grammar) == (pb.GRAMMAR_TYPE_LARK, "start: /.*/")
    assert parameters.HasField("reasoning")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0]"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id"),
    ],
)
def test_what_is_wrong_is_named(body: Any, param: str) -> None:
    answer = server_for().ask(PATH, body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param), answer.body


def test_a_failure_in_a_stream_is_an_event_with_a_code() -> None:
    outputs = [*outputs_of("hello", FinishReason.LENGTH)[:1], Output(error="the shard is gone")]
    server = Server(FakeBackend(lambda request: outputs, limits=ROOMY), FakeTemplate())
    *_, last = events_of(ask(server, stream=True).body)
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert last["response"]["output"][0]["content"][0]["text"]


# ---- the store -------------------------------------------------------------------------------------------------------


def test_a_response_belongs_to_the_key_that_asked_for_it() -> None:
    async def main() -> None:
        app = server_for(**KEYS).app
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in KEYS["api_keys"])
        response = (await post(app, PATH, {"input": "hi"}, mine)).json()
        place = f"{PATH}/{response['id']}"
        assert (await get(app, place, mine)).json() == response
        for refused in (
            await get(app, place, theirs),
            await get(app, f"{place}/input_items", theirs),
            await call(app, "DELETE", place, headers=theirs),
            await post(app, f"{place}/cancel", {}, theirs),
        ):
            assert refused.status == 404
        continued = {"input": "go on", "previous_response_id": response["id"]}
        assert (await post(app, PATH, continued, theirs)).status == 400
        assert (await post(app, PATH, continued, mine)).status == 200

    asyncio.run(main())


def test_what_was_said_before_is_said_again() -> None:
    async def main() -> None:
        server = server_for("<think>\nhm\n</think>\n\nhello")
        first = (await post(server.app, PATH, {"input": "one", "instructions": "Be brief."})).json()
        second = (await post(server.app, PATH, {"input": "two", "previous_response_id": first["id"]})).json()
        await post(server.app, PATH, {"input": "three", "previous_response_id": second["id"]})
        texts = [(message["role"], message["content"]) for message in rendered(server)]
        hello = ("assistant", "hello")
        assert texts == [("user", "one"), hello, ("user", "two"), hello, ("user", "three")]

    asyncio.run(main())


def test_nothing_is_stored_where_nothing_may_be() -> None:
    async def main(app: ASGIApp, **fields: Any) -> None:
        response = (await post(app, PATH, {"input": "hi", **fields})).json()
        assert response["store"] is False
        assert (await get(app, f"{PATH}/{response['id']}")).status == 404

    asyncio.run(main(server_for().app, store=False))
    asyncio.run(main(server_for(response_store_size=0).app))


def response(number: int, size: int = 100) -> StoredResponse:
    body = b'{"output":[]%b}'
    return StoredResponse(f"resp_{number}", b"[]", body % (b" " * (size - len(body))))


def test_the_store_is_bounded_and_the_key_that_has_most_makes_room(tmp_path: Path) -> None:
    async def main() -> None:
        store = ResponseStore(str(tmp_path / "file.sqlite"), 1000)
        await store.put("small", response(0))
        for number in range(1, 30):
            await store.put("large", response(number))
        assert await store.get("small", "resp_0") is not None
        kept = [number for number in range(1, 30) if await store.get("large", f"resp_{number}") is not None]
        assert kept == list(range(21, 30))
        await store.put("large", response(99, size=2000))  # more than there is room for
        assert await store.get("large", "resp_99") is None
        store.close()

    asyncio.run(main())


def test_a_file_is_read_by_another_process_and_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "file.sqlite")
        one, other = ResponseStore(path, 1000), ResponseStore(path, 1000)
        await one.put("", response(1))
        assert await other.get("", "resp_1") == response(1)
        one.close()
        other.close()
        again = ResponseStore(path, 1000)
        assert await again.get("", "resp_1") == response(1)
        again.close()

    asyncio.run(main())


def test_a_response_whose_process_is_gone_has_failed(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "file.sqlite")
        server = server_for(response_store=path)
        body = (await post(server.app, PATH, {"input": "hi"})).json() | {"status": "in_progress"}
        store = ResponseStore(path, 1 << 20)
        await store.put("", StoredResponse(body["id"], b"[]", json.dumps(body).encode(), owner="1:0"))
        found = (await get(server.app, f"{PATH}/{body['id']}")).json()
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        store.close()

    asyncio.run(main())


def test_a_response_in_the_background_is_cancelled_and_frees_what_it_had() -> None:
    async def main() -> None:
        server = server_for()
        server.backend.pause_after = 1
        started = (await post(server.app, PATH, {"input": "hi", "background": True})).json()
        assert started["status"] == "queued"
        await until(lambda: server.backend.requests)
        place = f"{PATH}/{started['id']}"
        assert (await post(server.app, f"{place}/cancel", {})).json()["status"] == "cancelled"
        await until(lambda: server.backend.cancelled)
        assert (await get(server.app, place)).json()["status"] == "cancelled"
        assert (await post(server.app, f"{place}/cancel", {})).json()["status"] == "cancelled"

    asyncio.run(main())


def test_a_response_in_the_background_that_is_refused_has_failed() -> None:
    async def main() -> None:
        refused = [Output(error="Model is overloaded", retry_after=2)]
        server = Server(FakeBackend(lambda request: refused, limits=ROOMY), FakeTemplate())
        answer = await post(server.app, PATH, {"input": "hi", "background": True, "stream": True})
        (event,) = events_of(answer.body)
        assert (event["type"], event["response"]["error"]["code"]) == ("response.failed", "rate_limit_exceeded")
        assert "try again in 2s" in event["response"]["error"]["message"]
        stored = await get(server.app, f"{PATH}/{event['response']['id']}")
        assert stored.json() == event["response"]

    asyncio.run(main())


def test_a_store_that_fails_keeps_no_answer_from_its_client(tmp_path: Path) -> None:
    file = tmp_path / "file.sqlite"
    file.write_bytes(b"this is no database" * 100)
    assert ask(server_for(response_store=str(file))).json()["status"] == "completed"


def test_a_client_that_hangs_up_does_not_end_a_response_in_the_background() -> None:
    async def main() -> None:
        server = server_for()
        server.backend.pause_after = 1
        body = json.dumps({"input": "hi", "background": True, "stream": True}).encode()
        first = Call(server.app, "POST", PATH, [body])
        await first.wait_for(2)
        first.hang_up()
        await asyncio.wait_for(first.task, 5)
        server.backend.go_on.set()
        (created, *_) = events_of(b"".join(message.get("body", b"") for message in first.sent[1:]))
        place = f"{PATH}/{created['response']['id']}"
        for _ in range(500):
            if (found := (await get(server.app, place)).json())["status"] == "completed":
                break
            await asyncio.sleep(0.01)
        assert found["output"][0]["content"][0]["text"] == "hello"

    asyncio.run(main())
