"""Requests made from the OpenAPI document of servers that embed texts: as `test_openapi.py` has for generation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
from schemathesis import Case, GenerationMode, Response

from legato.http.openapi import document
from legato.ipc.settings import RouterSettings
from tests.embeddings.served import EMBED_SETTINGS, app_of, embedder, with_labels
from tests.fuzz.documented import CASES, Operation, Send, fuzz, operations, read, sendings
from tests.fuzz.test_openapi import answer

# Requests of the kinds of servers together; in `make test` a part of them, because there are three.
SHARE_OF_CASES = 1.0 if CASES > 2000 else 0.15
SERVERS: dict[str, RouterSettings] = {
    "embedding": EMBED_SETTINGS,
    "classifier": with_labels("no", "yes"),
    "re-ranker": with_labels("score"),
}
OPERATIONS = [
    operation
    for operation in operations(read(json.loads(msgspec.json.encode(document(EMBED_SETTINGS)))))
    if operation.body and operation.path != "/tokenize"
]
SENDINGS = [(server, *sending) for server in SERVERS for sending in sendings(OPERATIONS)]
SHARE = -(-int(CASES * SHARE_OF_CASES) // len(SENDINGS))


@pytest.fixture(scope="module")
def senders() -> Iterator[dict[str, Send]]:
    """One application of each kind, which lives through all of it."""
    with asyncio.Runner() as runner:

        def sender(settings: RouterSettings) -> Send:
            assert settings.embedding is not None
            size = settings.embedding.size

            async def make() -> Any:
                return app_of(embedder(size), settings)

            app = runner.run(make())

            def send(case: Case) -> Response:
                parts: dict[str, Any] = case.as_transport_kwargs(base_url="http://test")
                return runner.run(answer(app, requests.Request(**parts).prepare()))

            return send

        yield {name: sender(settings) for name, settings in SERVERS.items()}


@pytest.mark.parametrize(
    ("server", "operation", "mode"),
    SENDINGS,
    ids=[f"{server}, {operation.label}, {mode.value}" for server, operation, mode in SENDINGS],
)
def test_answers_are_as_documented(
    server: str, operation: Operation, mode: GenerationMode, senders: dict[str, Send]
) -> None:
    assert fuzz(operation, mode, SHARE, senders[server]) >= SHARE
