from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legato.common.errors import OptionError
from legato.common.options import LauncherOptions
from legato.http.app import _routes
from legato.http.inference import Inference
from legato.http.openapi import document
from legato.ipc.api_keys import KeyRights, read_keys
from legato.telemetry.metrics import Metrics
from tests.http.asgi import LIMITS, SETTINGS, Answer, Call, FakeBackend, app_for, call, get, post, tokenizer

KEYS = ("first-key", "second-key")
OPEN = {
    (method, path) for method in ("GET", "HEAD") for path in ("/", "/health", "/ping", "/livez", "/readyz", "/startupz")
} | {(method, path) for method in ("GET", "HEAD") for path in ("/ui", "/dashboard", "/docs")}  # their data is closed
ROUTES = sorted(
    (method, route.path.replace("{model:path}", "m").replace("{name}", "m").replace("{version}", "1"))
    for route in _routes(Inference.create(FakeBackend(), tokenizer(), SETTINGS, Metrics(LIMITS)))
    for method in route.methods or ()
)


def request(method: str, path: str, headers: dict[str, str] | None = None, **settings: Any) -> Answer:
    return asyncio.run(call(app_for(api_keys=KEYS, **settings), method, path, headers=headers))


def status_with(**headers: str) -> int:
    return request("GET", "/info", {name.replace("_", "-"): value for name, value in headers.items()}).status


# ---- which routes ----------------------------------------------------------------------------------------------------


def test_the_table_of_routes_is_not_empty() -> None:
    assert len(ROUTES) > 25 and set(ROUTES) > OPEN


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route not in OPEN])
def test_without_a_key_a_route_is_closed(method: str, path: str) -> None:
    answer = request(method, path)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), sorted(OPEN))
def test_health_needs_no_key(method: str, path: str) -> None:
    assert request(method, path).status == 200


@pytest.mark.parametrize("path", ["/nothing", "/health/", "//health", "/health/../info", "/HEALTH", "/ping?"])
def test_a_path_that_only_resembles_an_open_one_is_closed(path: str) -> None:
    assert request("GET", path).status == 401


def test_an_open_path_is_open_for_reading_only() -> None:
    assert request("POST", "/").status == 401
    assert request("OPTIONS", "/health").status == 401


def test_the_health_route_of_vertex_is_open_and_its_predictions_are_not() -> None:
    routes = {"vertex_health_route": "/alive", "vertex_predict_route": "/predict"}
    assert request("GET", "/alive", **routes).status == 200
    assert request("POST", "/predict", **routes).status == 401


def test_without_keys_everything_is_open() -> None:
    assert asyncio.run(get(app_for(), "/info")).status == 200


# ---- which keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_any_of_the_keys_is_good_as_a_bearer_token(scheme: str, key: str) -> None:
    assert status_with(authorization=f"{scheme} {key}") == 200


def test_a_key_is_good_in_a_header_of_its_own() -> None:
    assert status_with(x_api_key="second-key") == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        "first-key",
        "Basic first-key",
        "Bearer FIRST-KEY",
        "Bearer first-ke",
        "Bearer first-key2",
        "Bearer first-key,second-key",
        "Bearer ключ",
        "Bearer \x00\xff",
    ],
)
def test_anything_else_is_refused(value: str) -> None:
    assert status_with(authorization=value) == 401


def test_a_key_may_have_any_letters() -> None:
    async def main() -> None:
        app = app_for(api_keys=("schlüssel",))
        assert (await get(app, "/info", {"authorization": "Bearer schlüssel"})).status == 200

    asyncio.run(main())


def test_every_key_is_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(key: bytes, candidate: bytes) -> bool:
        compared.append(key)
        return key == candidate

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert status_with(x_api_key="first-key") == 200
    assert compared == [b"first-key", b"second-key"]


# ---- what the refusal says -------------------------------------------------------------------------------------------


def test_the_refusal_is_in_the_words_of_the_api() -> None:
    native = request("POST", "/generate").json()
    assert native["error_type"] == "unauthorized" and "Bearer" in native["error"]
    error = request("POST", "/v1/chat/completions").json()["error"]
    assert error["type"] == "invalid_request_error" and "API key" in error["message"]


def test_a_browser_may_send_the_key_and_read_the_refusal() -> None:
    preflight = {
        "origin": "http://page",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-api-key",
    }
    assert request("OPTIONS", "/generate", preflight).status == 200
    assert request("POST", "/generate", {"origin": "http://page"}).headers["access-control-allow-origin"] == "*"


def test_nothing_is_read_or_computed_for_a_stranger() -> None:
    async def main() -> None:
        backend = FakeBackend()
        refused = Call(app_for(backend, api_keys=KEYS), "POST", "/generate", [b'{"inputs": "hi"}'])
        assert (await refused.answer()).status == 401
        assert not backend.requests

    asyncio.run(main())


def test_a_stream_passes_with_a_key() -> None:
    body, key = {"inputs": "hi"}, {"authorization": "Bearer first-key"}
    answer = asyncio.run(post(app_for(api_keys=KEYS), "/generate_stream", body, key))
    assert answer.events()[-1]["generated_text"] == "hello world"


def test_keys_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        request("GET", "/info", {"authorization": "Bearer first-key"})
        wrong = request("GET", "/info", {"authorization": "Bearer wrong-key"})
    assert "-key" not in caplog.text + wrong.body.decode() + repr(replace(SETTINGS, api_keys=KEYS))


def test_the_documentation_says_which_routes_need_a_key() -> None:
    described = document(replace(SETTINGS, api_keys=KEYS))
    assert KEYS[0] not in str(described)
    closed = {
        (method.upper(), path)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
        if "401" in operation["responses"] and operation["security"]
    }
    assert {(method.upper(), path) for path, methods in described["paths"].items() for method in methods} - closed == {
        route for route in OPEN if route[0] == "GET"
    }
    assert "security" not in str(document(SETTINGS))


# ---- where they come from --------------------------------------------------------------------------------------------


def test_keys_of_the_flag_and_of_the_file_are_good_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\nalpha\n\n  beta \n#gamma\n")
    assert read_keys(("flag",), str(file)) == dict.fromkeys(("flag", "alpha", "beta"), KeyRights())


def test_a_key_in_the_file_may_allow_a_better_priority(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("gold priority=0\nsilver\tpriority=4\nbronze\n")
    assert read_keys((), str(file)) == {"gold": KeyRights(0), "silver": KeyRights(4), "bronze": KeyRights(5)}


def test_a_key_in_the_file_may_allow_changes_of_adapters(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one adapters\ntwo priority=3 adapters\n")
    assert read_keys((), str(file)) == {"one": KeyRights(adapters=True), "two": KeyRights(3, adapters=True)}


@pytest.mark.parametrize(
    "line", ["key priority=10", "key priority=-1", "key priority", "key secret", "k priority=1 x", "k adapters=1"]
)
def test_a_line_that_is_not_understood_is_named_by_its_number_and_not_shown(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alpha\n{line}\n")
    with pytest.raises(OptionError, match="line 2: expected") as caught:
        read_keys((), str(file))
    assert "secret" not in str(caught.value)


def test_without_file_and_flag_there_are_none() -> None:
    assert read_keys((), None) == {}


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe"])
def test_a_file_without_keys_is_an_error_that_names_it(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=f"--api-key-file {file}"):
        read_keys(("flag",), str(file))


def test_an_empty_flag_does_not_open_the_server() -> None:
    with pytest.raises(OptionError, match="--api-key is empty"):
        LauncherOptions(api_key=(), given=frozenset({"api_key"}))
