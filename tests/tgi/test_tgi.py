"""TGI's integration tests, as far as tiny models can answer them: requests are theirs, and so are the answers' shapes.

`make test` has the cases of one model, `make test-tgi` all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from legato.common.sockets import free_port
from tests.integration.client import Client
from tests.integration.processes import launched
from tests.tgi.cases import GRAMMARS, MODELS, NATIVE, OracleCase
from tests.tgi.chats import CHAT_CASES, CHATS, SEEN
from tests.tgi.shapes import shape, stored

CASES = [*NATIVE, *GRAMMARS, *CHAT_CASES]
DOCS = Path(__file__).parents[2] / "docs"
COMPATIBILITY, QUICK_TOUR = DOCS / "compatibility.md", DOCS / "quicktour.md"
# What Legato's answers have that TGI's do not, or the other way round, and the row of compatibility.md that says so.
MORE = {
    r".*usage\.(prompt|completion)_tokens_details\.\w+: number": "| `usage` | three sums |",
    r"(\[\]\.)?details\.prefill\[\]\..*": "| prompt logprobs | only with `--enable-prefill-logprobs` |",
    r"\[\]\.choices\[\]\.delta\.content: string": "| first and last chunk of a stream |",
    r"\[\]\.choices\[\]\.finish_reason: string": "| `finish_reason` of a call |",
    r"\[\]\.usage\..*": "| `usage` in a stream of completions |",
}
FEWER = {
    r"(\[\]\.)?details\.top_tokens\[\].*": "| `top_n_tokens` with ties |",
}
FEWER_WITH_IMAGES = {
    r"(\[\]\.)?details\.prefill\[\]\..*": "`prefill` is empty if the prompt has images",
}
IN_MAKE_TEST = "llama"


def parameters() -> list[Any]:
    """One model after the other: a server is started once for all of its cases."""
    ordered = sorted(CASES, key=lambda case: list(MODELS).index(case.model))
    marks = {case.name: [] if case.model == IN_MAKE_TEST else [pytest.mark.tgi] for case in ordered}
    return [pytest.param(case, id=f"{case.file}-{case.test}", marks=marks[case.name]) for case in ordered]


class Servers(ExitStack):
    """The server of the model that was asked for last."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        super().__init__()
        self._make_folder = make_folder
        self._running: tuple[str, Client] | None = None

    def __call__(self, model: str) -> Client:
        if self._running is None or self._running[0] != model:
            self.close()
            self._running = model, self._start(model)
        return self._running[1]

    def _start(self, model: str) -> Client:
        maker, num_shard = MODELS[model]
        module, _, name = maker.partition(":")
        folder = getattr(import_module(module), name)(self._make_folder("model"))
        options = ["--env", "--max-concurrent-requests=8", f"--num-shard={num_shard}", f"--master-port={free_port()}"]
        return self.enter_context(launched(self._make_folder("server"), folder, *options, "--prometheus-port=0")).client


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp) as servers:
        yield servers


def test_tools_beside_a_regular_expression_are_refused_as_in_tgi(serve: Servers) -> None:
    asked = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [asked]}
    answer = serve(IN_MAKE_TEST).post(CHATS, {**body, "response_format": {"type": "regex", "value": "a+"}})
    assert answer.status == 422 and answer.json()["error_type"] == "tool_error"


@pytest.mark.parametrize("case", parameters())
def test_an_answer_has_the_shape_of_tgis(serve: Servers, case: OracleCase) -> None:
    found, expected = shape(case.call(serve(case.model))), shape_of(case)
    more = {line for line in found - expected if not any(re.fullmatch(known, line) for known in MORE)}
    without = {**FEWER, **FEWER_WITH_IMAGES} if case in SEEN else FEWER
    fewer = {line for line in expected - found if not any(re.fullmatch(known, line) for known in without)}
    assert (more, fewer) == (set(), set())


def shape_of(case: OracleCase) -> set[str]:
    """Of a stream, TGI's file may have kept only the last chunk."""
    lines = stored()[case.name]
    in_list = any(line.startswith("[]") for line in lines)
    return lines if in_list or "stream" not in case.test.split("_nostream")[0] else {f"[].{line}" for line in lines}


def test_at_least_twenty_files_of_tgi_are_covered_and_the_quick_tour_says_how_many() -> None:
    num_files = len({case.file for case in CASES})
    assert num_files >= 20
    assert f"the requests of {num_files} of TGI's integration test files" in QUICK_TOUR.read_text()


def test_every_difference_is_listed_where_users_look() -> None:
    page = COMPATIBILITY.read_text()
    for row in (*MORE.values(), *FEWER.values(), *FEWER_WITH_IMAGES.values()):
        assert row in page, row
