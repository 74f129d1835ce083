"""Whatever fails, and wherever: its own requests may fail with it, everybody else gets the right tokens."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from tests.generation import generation, sampling
from tests.server.faults import STAGES, FaultyServer
from tests.server.local import LocalServer, load
from tests.tiny_models import tiny_llama

NUM_TRIALS = 1000
NUM_TOKENS = 5
SMALL = dict(num_blocks=40, block_size=4, max_rows=4, step_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return load(tiny_llama(tmp_path_factory.mktemp("llama"), num_key_value_heads=1, **shape))


def request(request_id: int, kind: int) -> GenerationRequest:
    """Of 32 kinds: another prompt each, some that begin alike; every third samples."""
    rng = random.Random(kind // 2)
    prompt = [rng.randrange(3, 320) for _ in range(5 + kind)]
    drawn = sampling(do_sample=True, seed=kind, temperature=2.0, repetition_penalty=1.3) if kind % 3 == 0 else None
    return generation(request_id, prompt, NUM_TOKENS, drawn, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(model: CausalModel) -> list[list[int]]:
    return [*LocalServer(model, **SMALL).run([request(kind, kind) for kind in range(32)]).values()]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "legato")


def check(server: FaultyServer, ids_and_kinds: list[tuple[int, int]], expected: list[list[int]]) -> int:
    """All who did not fail have their tokens. Returns how many did."""
    answers = server.run([request(request_id, kind) for request_id, kind in ids_and_kinds])
    failed = [request_id for request_id in answers if request_id in server.errors]
    for request_id, kind in ids_and_kinds:
        if request_id not in failed:
            assert answers[request_id] == expected[kind], f"request {request_id} of kind {kind}"
    server.check_empty()
    return len(failed)


@pytest.mark.parametrize(("num_trials", "mixed"), [(NUM_TRIALS, False), (NUM_TRIALS // 20, True)])
def test_one_server_survives_a_thousand_anomalies(
    model: CausalModel, expected: list[list[int]], num_trials: int, mixed: bool
) -> None:
    server = FaultyServer(model, graphs=True, mixed=mixed, **SMALL)
    rng = random.Random(0)
    hits = failed = 0
    for trial in range(num_trials):
        error = rng.choice([torch.OutOfMemoryError, torch.OutOfMemoryError, RuntimeError, MemoryError, ValueError])
        server.faults.arm(STAGES[trial % len(STAGES)], rng.randrange(1, 8), error, times=rng.choice([1, 1, 2, 40]))
        kinds = rng.sample(range(32), rng.randrange(1, 4))
        failed += check(server, [(trial * 10 + i, kind) for i, kind in enumerate(kinds)], expected)
        hits += server.faults.hits
    assert hits > num_trials // 2 and failed > num_trials // 10, "the faults were felt"
    server.faults.arm("", 0)
    assert check(server, [(100_000 + kind, kind) for kind in range(32)], expected) == 0


@pytest.mark.parametrize("stage", ["forward", "logits"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_step_that_does_not_fit_once_is_computed_in_two(
    model: CausalModel, expected: list[list[int]], stage: str, nth: int
) -> None:
    server = FaultyServer(model, **SMALL)
    server.faults.arm(stage, nth)
    assert check(server, [(kind, kind) for kind in range(10, 14)], expected) == 0
    assert server.faults.hits == 1


def test_prompt_scores_of_a_step_in_pieces_are_those_of_a_whole_one(model: CausalModel) -> None:
    wanted = generation(1, list(range(3, 33)), 2, prompt_logprobs=True, top_n_tokens=2, ignore_eos=True)
    whole, pieces = (FaultyServer(model, num_blocks=40, max_rows=4, step_tokens=64) for _ in range(2))
    pieces.faults.arm("logits", 2, times=2)
    for server in (whole, pieces):
        server.run([wanted])
    first, second = (server.outputs[1][0] for server in (whole, pieces))
    assert first.prompt_logprobs is not None and second.prompt_logprobs is not None
    assert first.prompt_logprobs[1:] == pytest.approx(second.prompt_logprobs[1:], abs=1e-5)
    assert [[token for token, _ in top or []] for top in first.prompt_top_tokens or []] == [
        [token for token, _ in top or []] for top in second.prompt_top_tokens or []
    ]
    assert pieces.faults.hits == 2


def test_a_step_that_never_fits_fails_its_requests_with_a_cure(model: CausalModel, expected: list[list[int]]) -> None:
    server = FaultyServer(model, **SMALL)
    server.faults.arm("forward", 1, times=100)
    assert check(server, [(1, 1), (2, 2)], expected) == 2
    assert server.errors[1].startswith("Out of memory: a step of ")
    assert "--cuda-memory-fraction" in server.errors[1]


def test_a_capture_that_fails_costs_no_request(model: CausalModel, expected: list[list[int]]) -> None:
    server = FaultyServer(model, **SMALL)
    graphed = FaultyServer(model, graphs=True, **SMALL)
    graphed.faults.arm("capture", 1)
    assert graphed.engine.graphs is not None
    graphed.engine.graphs.capture_while_idle()
    assert graphed.faults.hits == 1 and not graphed.engine.graphs.num_pending
    for each in (server, graphed):
        assert check(each, [(kind, kind) for kind in range(8)], expected) == 0


def test_decodes_by_graph_give_the_same_tokens(model: CausalModel, expected: list[list[int]]) -> None:
    server = FaultyServer(model, graphs=True, **SMALL)
    assert server.engine.graphs is not None
    while server.engine.graphs.num_pending:
        server.engine.graphs.capture_while_idle()
    server.faults.arm("replay", 10**9)
    assert check(server, [(kind, kind) for kind in range(32)], expected) == 0
    assert server.faults._calls > 10, "graphs were used"
