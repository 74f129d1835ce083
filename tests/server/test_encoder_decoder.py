"""A tiny T5 behind scheduler and engine: the tokens of transformers, whatever happens around a request."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.models.registry import CausalModel
from legato.pb import generate_pb2 as pb
from legato.pb import pack_token_ids
from legato.scheduling.state import GenerationRequest
from legato.server.memory.capacity import RequestedLimits
from legato.server.model import Model
from legato.server.prepare import halves
from legato.server.rows import RowStep
from tests.models.tiny_t5 import START, generated, tiny_flan_t5, tiny_t5
from tests.server.faults import FaultyServer
from tests.server.local import LocalServer, load
from tests.server.shard import OPTIONS, Log, finish, load_model, prefill, request, serving, warmup

NUM_TOKENS = 20
LENGTHS = (1, 5, 16, 33, 7, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flan_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    return dict(enumerate(generated(folder, prompts(), NUM_TOKENS)))


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in LENGTHS]


def greedy(**more: object) -> list[GenerationRequest]:
    return [GenerationRequest(i, ids, NUM_TOKENS, ignore_eos=True, **more) for i, ids in enumerate(prompts())]  # type: ignore[arg-type]


def test_requests_at_random_times_get_the_tokens_that_transformers_generates(model, expected) -> None:
    assert LocalServer(model, step_tokens=64).run(greedy(), random.Random(1)) == expected


def test_preempted_requests_go_on_where_they_were(model, expected) -> None:
    server = LocalServer(model, num_blocks=10, block_size=8, step_tokens=50)
    assert server.run(greedy()) == expected
    assert server.scheduler.stats.preemptions > 0


def test_decode_graphs_read_the_prompts_length_from_the_rows(model, expected) -> None:
    server = FaultyServer(model, graphs=True, step_tokens=64)
    assert server.run(greedy()) == expected
    assert server.engine.graphs is not None
    assert [bool(graphs.policy.captured) for graphs in server.engine.graphs.kinds] == [True]  # and none of prompts


def test_a_step_that_does_not_fit_in_memory_is_cut_between_prompts(model, expected) -> None:
    server = FaultyServer(model, step_tokens=128)
    server.faults.arm("forward", 1, times=2)
    assert server.run(greedy()) == expected
    assert server.faults.hits == 2 and not server.errors


def test_a_prompt_that_does_not_fit_in_memory_is_lost_alone(model, expected) -> None:
    server = FaultyServer(model, step_tokens=128)
    server.faults.arm("forward", 1)
    server.submit(greedy()[1])
    server.step()
    assert "does not fit" in server.errors[1]
    assert server.run(greedy()[2:3]) == {2: expected[2]}


def test_a_prompt_is_never_cut() -> None:
    prompt = RowStep(row=0, start=0, count=10, samples=True, decode=False, num_whole=10)
    other = RowStep(row=1, start=0, count=4, samples=True, decode=False, num_whole=4)
    assert halves([prompt, other]) == ([prompt], [other])
    assert halves([other, prompt]) == ([other], [prompt])
    assert halves([prompt]) == ([prompt], [])


def test_an_answer_behind_a_prompt_is_cut() -> None:
    whole = RowStep(row=0, start=0, count=20, samples=True, decode=False, num_whole=8)
    first, rest = halves([whole])
    assert first == [RowStep(row=0, start=0, count=10, samples=False, decode=False, num_whole=8)]
    assert rest == [RowStep(row=0, start=10, count=10, samples=True, decode=False, num_whole=0)]


def test_penalties_are_for_what_the_decoder_has_before_it(model) -> None:
    server = LocalServer(model)
    said: list[tuple[list[int], list[int]]] = []
    server.engine.sampler.set_row = (  # type: ignore[method-assign]
        lambda row, params, prompt, answer, top_n_tokens: said.append((prompt.tolist(), answer.tolist()))
    )
    admissions = [
        pb.Admission(row=0, input_ids=pack_token_ids([9, 8, START])),
        pb.Admission(row=1, input_ids=pack_token_ids([9, 8, START, 5, 6]), num_generated=2),
    ]
    server.engine.launch(
        pb.StepRequest(admitted=admissions, rows=[0, 1], num_tokens=[3, 5], num_new_blocks=[1, 1], new_blocks=[1, 2])
    )
    assert said == [([START], []), ([START], [5, 6])]


def test_tokens_of_the_prompt_have_no_logprobs(model) -> None:
    server = LocalServer(model)
    server.run(greedy(prompt_logprobs=True))
    for i, length in enumerate(LENGTHS):
        assert server.outputs[i][0].prompt_logprobs == [None] * length
        assert server.outputs[i][0].prompt_top_tokens is None


def test_a_shard_says_what_its_router_must_know(folder) -> None:
    info = Model(load_model(folder), OPTIONS).info()
    assert info.decoder_start_token_id == START
    assert not info.support_chunking and not info.use_prefix_caching


@pytest.mark.parametrize("max_total_tokens", [2, 128])
def test_warm_up_runs_first_steps(folder, max_total_tokens) -> None:
    shard = Model(load_model(folder), OPTIONS)
    shard.warmup(warmup(max_total_tokens=max_total_tokens, max_batch_total_tokens=512))
    assert shard.capacity.max_total_tokens == max_total_tokens


def test_warmup_runs_the_largest_step(folder) -> None:
    """Most of its rows bring one token, which leaves their encoder nothing to read."""
    shard = Model(load_model(folder), OPTIONS)
    shard._run_largest_steps(
        RequestedLimits(warmup(), max_positions=128, block_size=4, bytes_per_token=shard.kv_shape.bytes_per_token)
    )


def test_fp16_has_room_for_what_the_layers_add_up_to(tmp_path) -> None:
    """A product of T5's feed-forward layers may be larger than any fp16 number; only its share of the sum counts."""
    file = tiny_t5(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    for name in (name for name in tensors if name.endswith(".wo.weight")):
        tensors[name] *= 1e5
    save_file(tensors, file, {"format": "pt"})
    server = LocalServer(load(tmp_path, torch.float16))
    server.run(greedy())
    assert np.isfinite([output.logprob for i in server.outputs for output in server.outputs[i]]).all()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (dict(relative_attention_num_buckets=2), "relative_attention_num_buckets=2 must be at least 4"),
        (dict(relative_attention_max_distance=5), "relative_attention_max_distance=5"),
        (dict(decoder_start_token_id=320), "decoder_start_token_id is 320, not a token id below vocab_size=320"),
        (dict(feed_forward_proj="gated-sine"), "the activation 'sine' is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_an_error_that_names_the_key(tmp_path, changes, problem) -> None:
    tiny_t5(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises((UnsupportedModel, ModelFileError), match=problem):
        load(tmp_path)


def test_tgis_calls_get_the_tokens_of_transformers(folder, tmp_path) -> None:
    prompts = [[9, 8, 7, 30, 31], [40]]

    async def talk() -> Log:
        log = Log()
        async with serving(load_model(folder), tmp_path / "s") as shard:
            await shard.Warmup(warmup())
            first = log.add(await shard.Prefill(prefill(1, request(1, prompts[0], 8, chunk_len=2))))
            both = log.add(await shard.Prefill(prefill(2, request(2, prompts[1], 8), join=first)))
            await finish(shard, log, both)
        return log

    log = asyncio.run(talk())
    assert [log.tokens[1], log.tokens[2]] == generated(folder, prompts, 8)
