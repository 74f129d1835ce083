from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from legato.api.native import GenerateParameters
from legato.http.app import _routes, create_app
from legato.http.inference import Inference
from legato.http.openapi import document
from legato.http.operations import OPERATIONS
from legato.http.pages.docs import PAGE
from legato.telemetry.metrics import Metrics
from tests.http.asgi import LIMITS, SETTINGS, FakeBackend, get, post, tokenizer
from tests.http.routes.openai.fakes import FakeTemplate

DOCUMENT: dict[str, Any] = json.loads(msgspec.json.encode(document(SETTINGS)))


def test_exactly_the_routes_of_the_router_are_documented() -> None:
    inference = Inference.create(FakeBackend(), tokenizer(), SETTINGS, Metrics(LIMITS))
    served = {
        (route.path.replace(":path", ""), method)
        for route in _routes(inference)
        for method in route.methods or ()
        if method != "HEAD"
    }
    described = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == served


def test_every_reference_leads_somewhere() -> None:
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert references and references <= DOCUMENT["components"]["schemas"].keys()


def test_every_parameter_is_described_with_its_default() -> None:
    properties = DOCUMENT["components"]["schemas"]["GenerateParameters"]["properties"]
    assert properties.keys() == set(GenerateParameters.__struct_fields__)
    for name, field in properties.items():
        assert field["description"] and "default" in field, name
    assert properties["top_p"]["maximum"] == 1


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("operation", [operation for operation in OPERATIONS if operation.request is not None])
def test_examples_are_answered(operation: Any) -> None:
    settings = replace(SETTINGS, changes_adapters=True)
    app = create_app(FakeBackend(), tokenizer(), settings, chat_template=FakeTemplate())
    assert asyncio.run(post(app, operation.path, operation.example)).status == 200


def test_the_document_and_the_page_are_served() -> None:
    async def main() -> None:
        app = create_app(FakeBackend(), tokenizer(), SETTINGS)
        answer = await get(app, "/api-doc/openapi.json")
        assert answer.json() == DOCUMENT
        page = await get(app, "/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert page.body.decode() == PAGE

    asyncio.run(main())


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?://|//[a-z]+\.|src=|@import", PAGE)
    loaded = set(re.findall('(?:href=|from )"([^"]+)"', PAGE))
    assert loaded == {"pages/icon.svg", "./pages/common.js", "api-doc/openapi.json"}


def test_backticks_of_descriptions_become_code_on_the_page() -> None:
    """Every text of the document passes through `prose`, which splits it at its backticks: they must be pairs."""
    shown = re.findall(r"(\w+)\([^()]*\b(?:info|operation|response|field|schema)\.(?:summary|description)\b", PAGE)
    assert shown == ["prose"] * 6
    texts: list[str] = []

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            texts.extend(node[key] for key in ("summary", "description") if isinstance(node.get(key), str))
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            collect(child)

    collect(DOCUMENT)
    assert any("`" in text for text in texts)
    assert not [text for text in texts if text.count("`") % 2]
