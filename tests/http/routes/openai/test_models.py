from __future__ import annotations

import asyncio

import pytest

from tests.http.asgi import Answer, get
from tests.http.routes.openai.fakes import Server


def ask(path: str) -> Answer:
    return asyncio.run(get(Server(settings={"model_id": "org/name"}).app, path))


def test_the_one_model_is_listed() -> None:
    answer = ask("/v1/models").json()
    assert answer["object"] == "list"
    (model,) = answer["data"]
    assert model.pop("created") > 0
    assert model == {"id": "org/name", "object": "model", "owned_by": "org/name"}


@pytest.mark.parametrize("path", ["/v1/models/org/name", "/v1/models/org%2Fname"])
def test_a_model_by_its_name(path: str) -> None:
    assert ask(path).json()["id"] == "org/name"


def test_another_model() -> None:
    answer = ask("/v1/models/gpt-4")
    assert answer.status == 404
    assert answer.json()["error"]["code"] == "model_not_found"
