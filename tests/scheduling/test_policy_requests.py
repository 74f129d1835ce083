"""How a request comes by its priority and its tenant."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from legato.ipc.api_keys import tenant_of
from legato.scheduling.state import GenerationRequest
from tests.http.asgi import Answer, FakeBackend, app_for, post

ROUTES: dict[str, Any] = {
    "/generate": lambda priority: {"inputs": "hi", "parameters": {"priority": priority}},
    "/generate_stream": lambda priority: {"inputs": "hi", "parameters": {"priority": priority}},
    "/v1/completions": lambda priority: {"prompt": "hi", "priority": priority},
    "/invocations": lambda priority: {"prompt": "hi", "priority": priority},
    "/vertex": lambda priority: {"instances": [{"inputs": "hi", "parameters": {"priority": priority}}]},
}


def ask(
    path: str, priority: int | None, key: str | None = None, **settings: Any
) -> tuple[Answer, list[GenerationRequest]]:
    async def run() -> tuple[Answer, list[GenerationRequest]]:
        backend = FakeBackend()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = await post(app_for(backend, **settings), path, ROUTES[path](priority), headers)
        return answer, backend.requests

    return asyncio.run(run())


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("given", "meant"), [(None, 5), (0, 0), (9, 9)])
def test_a_priority_reaches_the_scheduler(path: str, given: int | None, meant: int) -> None:
    _, requests = ask(path, given)
    assert [request.priority for request in requests] == [meant]


@pytest.mark.parametrize("given", [-1, 10])
@pytest.mark.parametrize(("path", "status"), [("/generate", 422), ("/v1/completions", 400)])
def test_there_are_ten_priorities(path: str, status: int, given: int) -> None:
    answer, requests = ask(path, given)
    assert (answer.status, requests) == (status, [])
    assert f"`priority` must be >= 0 and <= 9. Given: {given}" in answer.body.decode()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("key", "given", "meant"), [("plain", 0, 5), ("plain", 9, 9), ("gold", 0, 2), ("gold", 4, 4)])
def test_no_key_overtakes_others_unless_it_may(path: str, key: str, given: int, meant: int) -> None:
    """The attack: every request says that it is the most urgent one."""
    allowed = {tenant_of("gold"): 2}
    answer, requests = ask(path, given, key, api_keys=("plain", "gold"), best_priorities=allowed)
    assert answer.status == 200
    assert [request.priority for request in requests] == [meant]


@pytest.mark.parametrize("path", ROUTES)
def test_a_key_makes_a_tenant_whose_name_does_not_tell_it(path: str) -> None:
    _, requests = ask(path, None, "second", api_keys=("first", "second"))
    assert [request.tenant for request in requests] == [tenant_of("second")]
    assert "second" not in requests[0].tenant != tenant_of("first")


def test_without_keys_everybody_is_one_tenant() -> None:
    _, requests = ask("/generate", None, "whatever")
    assert [request.tenant for request in requests] == [""]
