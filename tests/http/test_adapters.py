"""LoRA adapters over HTTP: how requests name them, how they are listed, and who may load and unload them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from legato.http.scheduler import AdapterChangeFailed
from legato.ipc.api_keys import tenant_of
from legato.scheduling.adapters import AdapterInfo
from legato.scheduling.state import Output
from tests.http.asgi import FakeBackend, app_for, ask, get, post

FRENCH = AdapterInfo(7, "french", 2, "/srv/adapters/french")
NATIVE = ("/generate", "/", "/invocations")


def backend(**fields: Any) -> FakeBackend:
    return FakeBackend(adapters={"french": FRENCH}, **fields)


def native(adapter: str) -> dict[str, Any]:
    return {"inputs": "hi", "parameters": {"adapter_id": adapter}}


@pytest.mark.parametrize("path", NATIVE)
def test_adapter_id_chooses_an_adapter(path: str) -> None:
    scheduler = backend()
    assert ask(path, native("french"), scheduler).status == 200
    assert [request.adapter for request in scheduler.requests] == [7]


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("name", ["german", "", "tiny"])
def test_an_unknown_adapter_id_is_404_and_never_the_base_model(path: str, name: str) -> None:
    scheduler = backend()
    answer = ask(path, native(name), scheduler)
    assert answer.status == 404
    assert answer.json() == {
        "error": f"`adapter_id` is unknown: no adapter {name!r} is loaded",
        "error_type": "not_found",
    }
    assert not scheduler.requests


def test_an_unknown_adapter_is_the_clients_mistake_in_the_metrics() -> None:
    app = app_for(backend())
    assert asyncio.run(post(app, "/generate", native("german"))).status == 404
    samples = asyncio.run(get(app, "/metrics")).body.decode()
    assert 'tgi_request_failure{err="validation"} 1.0' in samples
    assert 'tgi_request_failure{err="internal"} 0.0' in samples


def test_a_stream_of_an_unknown_adapter_says_so_in_its_event() -> None:
    answer = ask("/generate_stream", native("german"), backend())
    assert answer.events()[0]["error_type"] == "not_found"


def openai(path: str, model: str | None) -> dict[str, Any]:
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    return body if model is None else {"model": model, **body}


@pytest.mark.parametrize(("model", "adapter"), [("french", 7), ("tiny", 0), ("tgi", 0), (None, 0)])
def test_model_chooses_an_adapter_or_the_base_model(model: str | None, adapter: int) -> None:
    scheduler = backend()
    answer = ask("/v1/completions", openai("/v1/completions", model), scheduler, takes_adapters=True)
    assert answer.status == 200 and answer.json()["model"] == ("french" if adapter else "tiny")
    assert [request.adapter for request in scheduler.requests] == [adapter]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_404_where_there_are_adapters(stream: bool) -> None:
    scheduler = backend()
    body = {**openai("/v1/completions", "german"), "stream": stream}
    answer = ask("/v1/completions", body, scheduler, takes_adapters=True)
    assert answer.status == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert not scheduler.requests


def test_a_server_without_adapters_answers_to_any_model() -> None:
    assert ask("/v1/completions", openai("/v1/completions", "gpt-4o")).status == 200


def test_an_adapter_that_goes_while_the_request_is_on_its_way_is_404() -> None:
    scheduler = backend(script=lambda request: [Output(error="not loaded any more", is_unknown=True)])
    answer = ask("/generate", native("french"), scheduler)
    assert (answer.status, answer.json()["error_type"]) == (404, "not_found")


def test_adapters_are_listed_with_their_parent() -> None:
    app = app_for(backend())
    listed = asyncio.run(get(app, "/v1/models")).json()["data"]
    assert [(model["id"], model.get("parent"), model.get("root")) for model in listed] == [
        ("tiny", None, None),
        ("french", "tiny", "/srv/adapters/french"),
    ]
    assert asyncio.run(get(app, "/v1/models/french")).json()["parent"] == "tiny"
    assert asyncio.run(get(app, "/v1/models/german")).status == 404


# ---- changes at run time ---------------------------------------------------------------------------------------------

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GERMAN = {"lora_name": "german", "lora_path": "/srv/adapters/german"}
KEYS = dict(api_keys=("user", "operator"), adapter_tenants=frozenset({tenant_of("operator")}))


def test_an_adapter_is_loaded_and_unloaded() -> None:
    scheduler = backend()
    app = app_for(scheduler, changes_adapters=True)
    for path, body in ((LOAD, GERMAN), (LOAD, {**GERMAN, "revision": "v2"}), (UNLOAD, {"lora_name": "german"})):
        answer = asyncio.run(post(app, path, body))
        assert answer.status == 200 and answer.json()["status"] == "success"
    source = GERMAN["lora_path"]
    assert scheduler.changes == [("german", source), ("german", f"{source}@v2"), ("german", None)]


@pytest.mark.parametrize(
    ("settings", "how", "status"),
    [
        ({}, {}, 403),
        ({"changes_adapters": True}, {"client": "10.0.0.9"}, 403),
        ({"changes_adapters": True}, {"headers": {"origin": "https://evil.example"}}, 403),
        ({"changes_adapters": True, **KEYS}, {}, 401),
        ({"changes_adapters": True, **KEYS}, {"headers": {"authorization": "Bearer user"}}, 403),
        ({"changes_adapters": True, **KEYS}, {"headers": {"authorization": "Bearer operator"}}, 200),
        ({"changes_adapters": True, **KEYS}, {"headers": {"x-api-key": "operator"}, "client": "10.0.0.9"}, 200),
    ],
)
def test_only_those_who_may_change_adapters_do(settings: dict[str, Any], how: dict[str, Any], status: int) -> None:
    scheduler = backend()
    app = app_for(scheduler, **settings)
    for path in (LOAD, UNLOAD):
        assert asyncio.run(post(app, path, GERMAN, **how)).status == status
    assert bool(scheduler.changes) is (status == 200)


@pytest.mark.parametrize("status", [403, 404, 409, 422, 503])
def test_what_the_router_refuses_has_its_status_and_words(status: int) -> None:
    scheduler = backend(refusal=AdapterChangeFailed("`lora_name`: no adapter 'german' is loaded", status))
    answer = ask(UNLOAD, {"lora_name": "german"}, scheduler, changes_adapters=True)
    assert answer.status == status
    assert answer.json()["error"]["message"] == "`lora_name`: no adapter 'german' is loaded"


@pytest.mark.parametrize("body", [{}, {"lora_name": 1, "lora_path": "x"}, {**GERMAN, "load_inplace": True}, b"no"])
def test_a_malformed_change_is_refused(body: Any) -> None:
    scheduler = backend()
    assert ask(LOAD, body, scheduler, changes_adapters=True).status == 400
    assert not scheduler.changes
