"""A model with an 8-bit KV cache says nearly the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from legato.common.options import ServerOptions
from legato.kernels.kv_format import as_stored
from legato.layers.kv_cache import KVCache
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from legato.server.loading import load as load_files
from legato.server.model import Model
from legato.server.prepare import prepare
from legato.server.rows import Rows
from tests.server.local import DEVICE, LocalServer, load
from tests.server.shard import warmup
from tests.tiny_models import tiny_llama

FORMATS = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Largest difference of a logit, in standard deviations of all logits. Three bits of mantissa round by up to 1/16, two
# by up to 1/8; attention averages much of it away.
BOUNDS = {"fp8_e4m3fn": 0.15, "fp8_e5m2": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.08)


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


def logits(model: CausalModel, dtype: torch.dtype) -> torch.Tensor:
    """Of the second half of a prompt, whose first half comes from the cache.

    The first half is computed with a full cache, which is then rounded: otherwise its rounding would be carried into
    the keys of the next layer.
    """
    caches = [KVCache(replace(model.kv_shape, dtype=each), 8, 16, DEVICE) for each in (torch.float32, dtype)]
    rows = Rows(1, 4, DEVICE)
    ids = np.random.default_rng(0).integers(3, 320, 60).tolist()
    rows.admit(0, 1, ids, 0, False)
    rows.append_blocks(0, [3, 1, 4, 2])
    rows.write_blocks()
    for cache in caches:
        step = replace(prepare(rows, [rows.advance(0, 30)], 16, torch.float32), logits_indices=None)
        hidden = model.forward(step, cache)
        if cache is not caches[-1]:
            for full, rounded in zip(cache.layers, caches[-1].layers, strict=True):
                rounded.keys.copy_(as_stored(full.keys, dtype))
                rounded.values.copy_(as_stored(full.values, dtype))
    return model.logits(hidden).cpu()


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
def test_logits_stay_close_to_those_of_a_full_cache(model: CausalModel, name: str) -> None:
    full = logits(model, torch.float32)
    error = (logits(model, FORMATS[name]) - full).abs().max() / full.std()
    assert 0 < error < BOUNDS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_generates_with_it(model: CausalModel, name: str) -> None:
    server = LocalServer(model)
    cache = KVCache(replace(model.kv_shape, dtype=FORMATS[name]), 64, 16, DEVICE)
    server.engine.cache = cache
    answer = server.run([GenerationRequest(i, [9, 8, 7 + i], 20, ignore_eos=True) for i in range(3)])
    assert [len(tokens) for tokens in answer.values()] == [20, 20, 20]


@pytest.mark.parametrize("name", FORMATS)
def test_the_option_makes_tokens_a_quarter_of_the_size_of_float32(folder: Path, name: str) -> None:
    options = ServerOptions(device="cpu", dtype="float32", kv_cache_dtype=name)
    shard = Model(load_files(ModelFiles.open(folder), options), options)
    shard.warmup(warmup())
    assert shard.engine.cache.layers[0].keys.dtype == FORMATS[name]
    assert shard.kv_shape.bytes_per_token * 4 == shard.loaded.model.kv_shape.bytes_per_token


def server_with(model: CausalModel, name: str, num_blocks: int = 512) -> LocalServer:
    server = LocalServer(model, num_blocks=num_blocks, max_rows=32)
    server.engine.cache = KVCache(replace(model.kv_shape, dtype=FORMATS[name]), num_blocks, 16, DEVICE)
    return server


def random_prompts(count: int) -> list[list[int]]:
    numbers = np.random.default_rng(1)
    return [numbers.integers(3, 320, int(length)).tolist() for length in numbers.integers(17, 60, count)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_prompt_has_the_same_answer_when_it_is_found_in_the_cache(model: CausalModel, name: str) -> None:
    prompts = random_prompts(100)
    fresh = server_with(model, name, 1024).run(
        [GenerationRequest(i, ids, 12, ignore_eos=True) for i, ids in enumerate(prompts)]
    )
    server = server_with(model, name, 1024)
    for first in (0, 1000):
        todo = [GenerationRequest(first + i, ids, 12, ignore_eos=True) for i, ids in enumerate(prompts)]
        answers = server.run(todo)
        assert [answers[first + i] for i in range(100)] == [fresh[i] for i in range(100)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_preempted_request_goes_on_with_the_same_tokens(model: CausalModel, name: str) -> None:
    prompts = random_prompts(32)
    todo = [GenerationRequest(i, ids, 24, ignore_eos=True) for i, ids in enumerate(prompts)]
    expected = server_with(model, name).run(todo)
    crowded = server_with(model, name, 60)
    assert crowded.run(todo) == expected
    assert crowded.scheduler.stats.preemptions > 0
