"""Many adapters in one batch, with and without graphs, against base models with their weights merged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec import structs

from legato.scheduling.state import GenerationRequest
from tests.lora.tiny_adapters import (
    AdaptedModel,
    base_model,
    greedy_tokens,
    merged_model,
    random_prompts,
    write_adapter,
)
from tests.server.faults import Faults, record
from tests.server.local import DEVICE, LocalServer
from tests.tiny_models import tiny_llama

NUM_ADAPTERS = 10
RANKS = (1, 8, 16, 33, 64)
NUM_TOKENS = 4
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    folder = tmp_path_factory.mktemp("many")
    base = tiny_llama(folder / "base", head_dim=8, **SHAPE)  # type: ignore[arg-type]
    folders = {
        f"a{i}": write_adapter(base, folder / f"a{i}", seed=i, rank=RANKS[i % len(RANKS)]) for i in range(NUM_ADAPTERS)
    }
    return AdaptedModel.load(base, folders)


@pytest.fixture(scope="module")
def requests(model: AdaptedModel) -> list[GenerationRequest]:
    """Three for every adapter, and some without one, in no order."""
    prompts = random_prompts(3, 320, longest=20)
    numbers = [*(info.number for info in model.infos), *[0] * 4] * 3
    random.Random(0).shuffle(numbers)
    return [
        GenerationRequest(i + 1, prompts[i % 3], NUM_TOKENS, ignore_eos=True, adapter=number)
        for i, number in enumerate(numbers)
    ]


@pytest.fixture(scope="module")
def expected(model: AdaptedModel, requests: list[GenerationRequest]) -> dict[int, list[int]]:
    base = base_model(Path(model.infos[0].path).parent / "base")
    merged = {info.number: merged_model(base, Path(info.path)) for info in model.infos}
    merged[0] = base
    known: dict[str, list[int]] = {}
    for request in requests:
        key = f"{request.adapter} {request.input_ids}"
        if key not in known:
            known[key] = greedy_tokens(merged[request.adapter], request.input_ids, NUM_TOKENS)
    return {request.id: known[f"{request.adapter} {request.input_ids}"] for request in requests}


def graphed(model: AdaptedModel, **how: int) -> LocalServer:
    """On a CPU with graphs that compute their step again, on a GPU with real ones. They are captured while one adapter
    is on the device."""
    server = model.server(**{"num_blocks": 512, "max_rows": 32, "step_tokens": 64, **how})
    first = GenerationRequest(10_000, [5, 6, 7], 2, ignore_eos=True, adapter=model.infos[0].number)
    server.run([first])
    if DEVICE.type == "cpu":
        server.engine.use_graphs((), record(Faults()), mixed=[32, 64])
    assert server.engine.graphs is not None
    server.engine.graphs.capture_first()
    return server


def test_no_request_gets_a_token_of_another_adapter(
    model: AdaptedModel, requests: list[GenerationRequest], expected: dict[int, list[int]]
) -> None:
    server = model.server(num_blocks=512, max_rows=48, step_tokens=128)
    assert server.run(requests, random.Random(1)) == expected


def test_drafts_are_verified_with_the_adapter_of_their_request(
    model: AdaptedModel, requests: list[GenerationRequest]
) -> None:
    """The second time the answers are known, to the same prompts with other adapters, too."""
    longer = [structs.replace(request, max_new_tokens=24) for request in requests]
    how = dict(num_blocks=512, max_rows=48, step_tokens=128)
    server, expected = model.server(speculate=15, **how), model.server(**how).run(longer)
    assert server.run(longer, random.Random(1)) == expected == server.run(longer, random.Random(2))
    assert any(output.is_draft for outputs in server.outputs.values() for output in outputs)


def test_graphs_captured_with_one_adapter_are_right_for_all(
    model: AdaptedModel, requests: list[GenerationRequest], expected: dict[int, list[int]]
) -> None:
    server = graphed(model)
    eager = []
    forward = server.engine._forward
    server.engine._forward = lambda parts: (eager.append(parts), forward(parts))[1]  # type: ignore
    assert server.run(requests, random.Random(2)) == expected
    assert not eager, "every step ran with a graph"


def test_a_step_without_adapters_runs_with_the_graph_that_knows_none(
    model: AdaptedModel, requests: list[GenerationRequest], expected: dict[int, list[int]]
) -> None:
    server = graphed(model)
    assert server.engine.graphs is not None
    used: list[bool] = []
    for graphs in server.engine.graphs.kinds:
        replay = graphs._replay
        graphs._replay = lambda size, graphs=graphs, replay=replay: (used.append(graphs.has_adapters), replay(size))[1]  # type: ignore
    plain = [request for request in requests if not request.adapter]
    assert server.run(plain) == {request.id: expected[request.id] for request in plain}
    assert used and not any(used)
    mixed = requests[:12]
    assert server.run(mixed) == {request.id: expected[request.id] for request in mixed}
    assert any(used)
