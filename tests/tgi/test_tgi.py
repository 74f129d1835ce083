"""TGI's integration tests, as far as tiny models can answer them: requests are theirs, and so are the answers' shapes.

`make test` has the cases of one model, `make test-tgi` all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.integration.client import Client
from tests.integration.processes import free_port, launched
from tests.tgi.cases import GRAMMARS, MODELS, NATIVE, OracleCase
from tests.tgi.chats import CHAT_CASES, CHATS
from tests.tgi.shapes import shape, stored

CASES = [*NATIVE, *GRAMMARS, *CHAT_CASES]
COMPATIBILITY = Path(__file__).parents[2] / "docs" / "compatibility.md"
# What Legato's answers have that TGI's do not, or the other way round, and the row of compatibility.md that says so.
MORE = {
    r".*usage\.prompt_tokens_details\.cached_tokens: number": "| `usage` | three sums |",
    r"(\[\]\.)?details\.prefill\[\]\..*": "| prompt logprobs | only with `--enable-prefill-logprobs` |",
    r"\[\]\.choices\[\]\.delta\.content: string": "| first and last chunk of a stream |",
    r"\[\]\.choices\[\]\.finish_reason: string": "| `finish_reason` of a call |",
    r"\[\]\.usage\..*": "| `usage` in a stream of completions |",
}
FEWER = {
    r"(\[\]\.)?details\.top_tokens\[\].*": "| `top_n_tokens` with ties |",
}
IN_MAKE_TEST = "llama"


def parameters() -> Iterator[Any]:
    for case in CASES:
        marks = [] if case.model == IN_MAKE_TEST else [pytest.mark.tgi]
        yield pytest.param(case.model, case, id=f"{case.file}-{case.test}", marks=marks)


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    maker, num_shard = MODELS[request.param]
    module, _, name = maker.partition(":")
    folder = getattr(import_module(module), name)(tmp_path_factory.mktemp("model"))
    options = ["--env", "--max-concurrent-requests=8", f"--num-shard={num_shard}", f"--master-port={free_port()}"]
    with launched(tmp_path_factory.mktemp("server"), folder, *options, "--prometheus-port=0") as server:
        yield server.client


@pytest.mark.parametrize(("client", "case"), parameters(), indirect=["client"])
def test_an_answer_has_the_shape_of_tgis(client: Client, case: OracleCase) -> None:
    found, expected = shape(case.call(client)), shape_of(case)
    more = {line for line in found - expected if not any(re.fullmatch(known, line) for known in MORE)}
    fewer = {line for line in expected - found if not any(re.fullmatch(known, line) for known in FEWER)}
    assert (more, fewer) == (set(), set())


def shape_of(case: OracleCase) -> set[str]:
    """Of a stream, TGI's file may have kept only the last chunk."""
    lines = stored()[case.name]
    in_list = any(line.startswith("[]") for line in lines)
    return lines if in_list or "stream" not in case.test.split("_nostream")[0] else {f"[].{line}" for line in lines}


@pytest.mark.parametrize("client", [IN_MAKE_TEST], indirect=True)
def test_tools_and_response_format_together_are_refused_as_in_tgi(client: Client) -> None:
    asked = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [asked]}
    answer = client.post(CHATS, {**body, "response_format": {"type": "json_object", "value": {"properties": {}}}})
    assert answer.status == 422 and answer.json()["error_type"] == "tool_error"


def test_at_least_twenty_files_of_tgi_are_covered() -> None:
    assert len({case.file for case in CASES}) >= 20


def test_every_difference_is_listed_where_users_look() -> None:
    page = COMPATIBILITY.read_text()
    for row in (*MORE.values(), *FEWER.values()):
        assert row in page, row
