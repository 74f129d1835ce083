"""The same requests to real processes with a tiny model. Only `make fuzz` names this file: it takes a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from schemathesis import Case, GenerationMode, Response

from tests.fuzz.documented import Operation, Send, fuzz
from tests.fuzz.test_openapi import SENDINGS, SHARE
from tests.integration.processes import Launched, launched
from tests.tiny_models import tiny_llama

# Of the requests that the application alone gets: each of these runs a model.
PORTION = 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    model = tiny_llama(tmp_path_factory.mktemp("model"))
    with launched(tmp_path_factory.mktemp("server"), model) as running:
        yield running


@pytest.fixture(scope="module")
def send(server: Launched) -> Send:
    def send(case: Case) -> Response:
        return case.call(base_url=f"http://127.0.0.1:{server.port}")

    return send


@pytest.mark.parametrize(
    ("operation", "mode"), SENDINGS, ids=[f"{operation.label}, {mode.value}" for operation, mode in SENDINGS]
)
def test_answers_of_a_server_are_as_documented(operation: Operation, mode: GenerationMode, send: Send) -> None:
    assert fuzz(operation, mode, max(SHARE // PORTION, 1), send) >= 1


def test_the_server_is_as_well_as_before(server: Launched) -> None:
    assert server.client.get("/health").status == 200
    assert server.client.generate("still here", max_new_tokens=3)["generated_text"]
    assert "Traceback" not in server.log + server.stderr
