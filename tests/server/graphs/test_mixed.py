"""Steps with prompts as graphs: the same tokens, whatever a step is made of, and no launch besides."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from legato.server.graphs import mixed as mixed_graphs
from legato.server.rows import RowStep
from tests.server.faults import Faults, record
from tests.server.local import DEVICE, LocalServer, load
from tests.server.test_same_tokens import greedy, sampled
from tests.tiny_models import tiny_llama


class GraphedServer(LocalServer):
    """On a CPU with graphs that compute their step again, on a GPU with real ones."""

    def __init__(self, model: CausalModel, **settings: int) -> None:
        super().__init__(model, **settings)  # type: ignore[arg-type]
        if DEVICE.type == "cpu":
            self.engine.use_graphs((), record(Faults()), mixed=[32, 64, 128, 256, 512])
        assert self.engine.graphs is not None
        self.engine.graphs.capture_first()
        self.steps_without: list[list[RowStep]] = []
        forward = self.engine._forward
        self.engine._forward = lambda parts: (self.steps_without.append(parts), forward(parts))[1]  # type: ignore


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return load(tiny_llama(tmp_path_factory.mktemp("llama"), num_key_value_heads=1, **shape))  # type: ignore[arg-type]


def few(requests: list[GenerationRequest]) -> list[GenerationRequest]:
    """Half of them, and half as long: without a device all this is slow."""
    return [replace(request, max_new_tokens=12) for request in requests[::2]]


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def requests(request: pytest.FixtureRequest) -> list[GenerationRequest]:
    return few(greedy() if request.param == "greedy" else sampled())


@pytest.fixture(scope="module")
def expected(model: CausalModel, requests: list[GenerationRequest]) -> dict[int, list[int]]:
    return LocalServer(model).run(requests)


@pytest.mark.parametrize("step_tokens", [17, 64, 512])
def test_prompts_in_chunks_among_decodes(
    model: CausalModel, requests: list[GenerationRequest], expected: dict[int, list[int]], step_tokens: int
) -> None:
    server = GraphedServer(model, step_tokens=step_tokens)
    assert server.run(requests, random.Random(step_tokens)) == expected
    assert server.steps_without == []


def test_preempted_requests_are_computed_again(
    model: CausalModel, requests: list[GenerationRequest], expected: dict[int, list[int]]
) -> None:
    server = GraphedServer(model, block_size=4, num_blocks=40, max_rows=8)
    assert server.run(requests) == expected
    assert server.scheduler.stats.preemptions > 0 and server.steps_without == []


def test_prefixes_that_are_in_the_cache(
    model: CausalModel, requests: list[GenerationRequest], expected: dict[int, list[int]]
) -> None:
    server = GraphedServer(model)
    assert server.run(requests) == expected
    assert server.run(requests) == expected
    assert server.scheduler.stats.cached_tokens > 0 and server.steps_without == []


@pytest.mark.parametrize(("limit", "most"), [("MOST_CHUNKS", 2), ("LONGEST_CONTEXT", 20)])
def test_what_a_graph_has_no_room_for_runs_without(
    model: CausalModel,
    requests: list[GenerationRequest],
    expected: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    most: int,
) -> None:
    monkeypatch.setattr(mixed_graphs, limit, most)
    server = GraphedServer(model)
    assert server.run(requests[:4]) | server.run(requests[4:], random.Random(3)) == expected
    assert server.steps_without


def test_who_wants_the_log_probabilities_of_a_prompt_gets_them(model: CausalModel) -> None:
    wanted = greedy(prompt_logprobs=True)[:4]
    without, server = LocalServer(model), GraphedServer(model)
    assert server.run(wanted) == without.run(wanted)
    for request in wanted:
        ours, theirs = ([output.prompt_logprobs for output in each.outputs[request.id]] for each in (server, without))
        assert ours == theirs and ours[0] is not None


def test_later_tokens_of_who_wanted_them_leave_others_their_graph(model: CausalModel) -> None:
    curious, other = greedy(prompt_logprobs=True)[0], greedy()[1]
    server = GraphedServer(model)
    server.submit(curious)
    while not server.outputs[curious.id]:
        server.step()
    assert server.steps_without
    server.steps_without.clear()
    server.run([other])
    assert server.steps_without == []


@pytest.mark.parametrize("name", ["bloom", "mistral", "gemma2"])
def test_other_kinds_of_attention(name: str, tmp_path: Path) -> None:
    """Slopes, a window, a soft cap."""
    from tests.models.test_architectures import CASES

    case = next(case for case in CASES if case.name.startswith(name))
    model = load(case.make(tmp_path, **case.changes))
    assert GraphedServer(model).run(few(greedy()), random.Random(4)) == LocalServer(model).run(few(greedy()))


@pytest.mark.parametrize(("speculate", "max_rows"), [(3, 16), (6, 2)])
def test_drafts_run_in_the_graphs_of_prompts(
    model: CausalModel, requests: list[GenerationRequest], expected: dict[int, list[int]], speculate: int, max_rows: int
) -> None:
    """What a row goes on with afterwards, in a graph of decodes, is the last token that it got. A step may sample at
    more positions than a shard has rows."""
    few = requests[:4]  # all that they sample has room in a graph
    again = [replace(request, id=request.id + 100) for request in few]
    server = GraphedServer(model, speculate=speculate, max_rows=max_rows)
    wanted = [expected[request.id] for request in few]
    assert list(server.run(few).values()) == wanted
    assert list(server.run(again).values()) == wanted
    assert server.steps_without == []
    drafts = [output.is_draft for outputs in server.outputs.values() for output in outputs]
    assert sum(drafts) > 20  # the second answers are the first ones again
