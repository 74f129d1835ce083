"""A request gets the same tokens whatever happens around it, and they are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from tests.generation import generation, sampling
from tests.server.local import LocalServer, load
from tests.tiny_models import greedy_oracle, tiny_llama

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [
        [rng.randrange(3, 320) for _ in range(length)]
        for length in (1, 2, 5, 16, 17, 31, 40, 64, 3, 9, 33, 12, 48, 7, 25, 80)
    ]


def greedy(**more: object) -> list[GenerationRequest]:
    return [
        generation(i, prompt, NUM_TOKENS, ignore_eos=True, **more)  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts())
    ]


def sampled() -> list[GenerationRequest]:
    """A bit of everything, each with its own seed."""
    kinds = [
        dict(temperature=0.8), dict(top_k=7), dict(top_p=0.7), dict(typical_p=0.6), dict(min_p=0.1),
        dict(repetition_penalty=1.4), dict(frequency_penalty=0.7, presence_penalty=0.3), dict(watermark=True),
        dict(logit_bias={5: 3.0, 9: -100.0}), dict(temperature=1.5, top_k=20, top_p=0.9, repetition_penalty=1.1),
    ]  # fmt: skip
    return [
        generation(
            i, prompt, NUM_TOKENS, ignore_eos=True,
            parameters=sampling(do_sample=True, seed=1000 + i, **kinds[i % len(kinds)]),  # type: ignore[arg-type]
        )
        for i, prompt in enumerate(prompts())
    ]  # fmt: skip


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def requests(request: pytest.FixtureRequest) -> list[GenerationRequest]:
    return greedy() if request.param == "greedy" else sampled()


@pytest.fixture(scope="module")
def alone(model: CausalModel, requests: list[GenerationRequest]) -> dict[int, list[int]]:
    return {each.id: LocalServer(model).run([each])[each.id] for each in requests}


def test_greedy_tokens_are_those_of_transformers(folder: Path, model: CausalModel) -> None:
    answers = LocalServer(model).run(greedy())
    assert [answers[i] for i in range(16)] == greedy_oracle(folder, prompts(), NUM_TOKENS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_a_batch_of_16_that_arrive_at_random_times(
    model: CausalModel, requests: list[GenerationRequest], alone: dict[int, list[int]], seed: int
) -> None:
    assert LocalServer(model).run(requests, random.Random(seed)) == alone


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_in_prompt_chunks_of_any_size(
    model: CausalModel, requests: list[GenerationRequest], alone: dict[int, list[int]], chunk: int
) -> None:
    server = LocalServer(model, step_tokens=chunk, max_rows=min(chunk, 4), prefix_caching=False)
    assert server.run(requests, random.Random(1)) == alone


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_with_any_block_size(
    model: CausalModel, requests: list[GenerationRequest], alone: dict[int, list[int]], block_size: int
) -> None:
    server = LocalServer(model, block_size=block_size, num_blocks=1 + 2048 // block_size)
    assert server.run(requests, random.Random(2)) == alone


def test_when_the_prefix_is_cached(
    model: CausalModel, requests: list[GenerationRequest], alone: dict[int, list[int]]
) -> None:
    server = LocalServer(model, block_size=4)
    assert server.run(requests) == alone
    cached = server.scheduler.stats.cached_tokens
    again = [msgspec.structs.replace(each, id=100 + each.id) for each in requests]
    assert [*server.run(again).values()] == [*alone.values()]
    assert server.scheduler.stats.cached_tokens > cached + 200


def test_when_the_cache_is_so_small_that_requests_are_preempted(
    model: CausalModel, requests: list[GenerationRequest], alone: dict[int, list[int]]
) -> None:
    server = LocalServer(model, block_size=4, num_blocks=64, max_rows=8)
    assert server.run(requests, random.Random(3)) == alone
    assert server.scheduler.stats.preemptions > 0


def test_prompt_logprobs_and_top_tokens_do_not_depend_on_chunks(model: CausalModel) -> None:
    wanted = [
        generation(i, prompt, 3, ignore_eos=True, prompt_logprobs=True, top_n_tokens=4)
        for i, prompt in enumerate(prompts()[:6])
    ]
    whole, cut = LocalServer(model), LocalServer(model, step_tokens=5, max_rows=3)
    whole.run(wanted)
    cut.run(wanted)
    for each in wanted:
        first, second = whole.outputs[each.id], cut.outputs[each.id]
        assert first[0].prompt_logprobs == pytest.approx(second[0].prompt_logprobs, abs=1e-4)
        assert len(first[0].prompt_logprobs or []) == len(each.input_ids)
        for one, other in zip(first, second, strict=True):
            assert [t for t, _ in one.top_tokens or []] == [t for t, _ in other.top_tokens or []]
            assert len(one.top_tokens or []) == 4
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
