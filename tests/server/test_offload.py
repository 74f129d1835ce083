"""Prefixes that were evicted come back from host memory, and nobody's text changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legato.common.options import ServerOptions
from legato.layers.kv_cache import KVCache
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.pb import generate_pb2 as pb
from legato.scheduling.state import GenerationRequest
from legato.server.interceptor import RequestRefused
from legato.server.loading import load as load_files
from legato.server.memory.budget import OutOfMemory
from legato.server.memory.offload import HostBlockStore
from legato.server.model import Model
from tests.server.local import DEVICE, LocalServer, load
from tests.server.shard import warmup
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.08)


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


def conversations(turn: int) -> list[GenerationRequest]:
    """Five, of 30 to 42 tokens and six more with every turn."""
    prompts = [[3 + (number * 37 + at) % 300 for at in range(30 + 3 * number + 6 * turn)] for number in range(5)]
    return [
        GenerationRequest(100 * turn + number, prompt, 12, ignore_eos=True) for number, prompt in enumerate(prompts)
    ]


def test_returning_conversations_get_the_same_tokens(model: CausalModel) -> None:
    """The small cache holds two of five conversations, and preempts when more of them run."""
    large = LocalServer(model, num_blocks=400, block_size=4)
    small = LocalServer(model, num_blocks=26, block_size=4, host_bytes=1 << 22)
    none = LocalServer(model, num_blocks=26, block_size=4)
    for turn in range(2):
        expected = large.run(conversations(turn))
        assert small.run(conversations(turn)) == expected
        assert none.run(conversations(turn)) == expected
    assert small.scheduler.stats.preemptions > 0
    assert small.scheduler.stats.cached_tokens > 2 * none.scheduler.stats.cached_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_block_comes_back_as_it_was(model: CausalModel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces of memory, and more blocks than the buffer holds."""
    shape = replace(model.kv_shape, dtype=dtype)
    size = shape.bytes_per_token * 4
    monkeypatch.setattr("legato.server.memory.offload.PIECE", 3 * size)
    monkeypatch.setattr("legato.server.memory.offload.BUFFER", 4 * size)
    cache, store = KVCache(shape, 20, 4, DEVICE), HostBlockStore(shape, 4, 11 * size, DEVICE)
    assert store.num_slots == 11
    for layer in cache.layers:
        layer.keys.view(torch.uint8).random_(0, 100)
        layer.values.view(torch.uint8).random_(0, 100)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    blocks, slots = [2, 3, 19, 7, 8, 1, 5], [1, 2, 3, 4, 10, 9, 0]
    store.run(pb.StepRequest(copied_out_blocks=blocks, copied_out_slots=slots), cache)
    for layer in cache.layers:
        layer.keys[blocks], layer.values[blocks] = layer.keys[blocks[::-1]], layer.values[blocks[::-1]]
    store.run(pb.StepRequest(copied_in_slots=slots, copied_in_blocks=blocks), cache)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys.view(torch.uint8), keys.view(torch.uint8))
        assert torch.equal(layer.values.view(torch.uint8), values.view(torch.uint8))


def test_slots_side_by_side_are_one_copy(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation is evicted from its end, so the slots of its blocks are in descending order."""
    size = model.kv_shape.bytes_per_token * 4
    cache, store = KVCache(model.kv_shape, 20, 4, DEVICE), HostBlockStore(model.kv_shape, 4, 11 * size, DEVICE)
    runs, find = [], store._runs
    monkeypatch.setattr(store, "_runs", lambda slots: [runs.append(found) or found for found in find(slots)])
    blocks, slots = [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 0]
    for layer in cache.layers:
        layer.keys[1:7] = torch.arange(6, device=DEVICE)[:, None, None, None].to(layer.keys.dtype)
    store.run(pb.StepRequest(copied_out_blocks=blocks, copied_out_slots=slots), cache)
    store.run(pb.StepRequest(copied_in_slots=slots, copied_in_blocks=[11, 12, 13, 14, 15, 16]), cache)
    assert len(runs) == 4
    for layer in cache.layers:
        assert torch.equal(layer.keys[11:17], layer.keys[1:7])


@pytest.mark.parametrize(("slots", "blocks"), [([11], [1]), ([1], [20]), ([1, 2], [1])])
def test_slots_and_blocks_are_checked(model: CausalModel, slots: list[int], blocks: list[int]) -> None:
    size = model.kv_shape.bytes_per_token * 4
    cache, store = KVCache(model.kv_shape, 20, 4, DEVICE), HostBlockStore(model.kv_shape, 4, 11 * size, DEVICE)
    with pytest.raises(RequestRefused, match="copied blocks"):
        store.run(pb.StepRequest(copied_in_slots=slots, copied_in_blocks=blocks), cache)


def shard(folder: Path, gigabytes: float) -> Model:
    options = ServerOptions(device="cpu", dtype="float32", kv_offload_gb=gigabytes)
    return Model(load_files(ModelFiles.open(folder), options), options)


def test_the_shard_has_as_many_slots_as_fit(folder: Path) -> None:
    model = shard(folder, 0.01)
    model.warmup(warmup())
    assert model.host_blocks is not None
    assert model.host_blocks.num_slots == 10**7 // (model.kv_shape.bytes_per_token * model.block_size)


class SmallerPeer:
    """A shard with half as much room as the one that asks."""

    def all_reduce(self, x: torch.Tensor) -> None:
        raise AssertionError("nothing is computed together")

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is computed together")

    def least(self, value: int) -> int:
        return value // 2


def test_shards_agree_on_the_number_of_slots(folder: Path) -> None:
    model = shard(folder, 0.02)
    model.loaded = replace(model.loaded, shard=Shard(0, 2, SmallerPeer()))
    model.warmup(warmup())
    assert model.host_blocks is not None
    assert model.host_blocks.num_slots == 10**7 // model.kv_shape.block_bytes(model.block_size) // 2


def test_more_than_the_host_has_is_refused(folder: Path) -> None:
    with pytest.raises(OutOfMemory, match="--kv-offload-gb"):
        shard(folder, 1e6).warmup(warmup())
