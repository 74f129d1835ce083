"""Models that keep states, in the server: shared prefixes, preemption and blocks in host memory change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from legato.common.errors import OptionError
from legato.common.options import ServerOptions
from legato.layers.kv_cache import HybridShape, StateShape
from legato.modelfiles.files import ModelFiles
from legato.models.registry import CausalModel
from legato.scheduling.state import GenerationRequest
from legato.server.loading import load as load_files
from legato.server.model import Model
from tests.models.answers import prompts
from tests.models.oracle import oracle_logits
from tests.models.tiny_hybrid import tiny_qwen3_next
from tests.models.tiny_mamba import tiny_mamba
from tests.server.graphs.test_mixed import GraphedServer
from tests.server.local import LocalServer, load
from tests.server.shard import warmup

NUM_TOKENS = 20


@pytest.fixture(scope="module", params=[tiny_mamba, tiny_qwen3_next])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = request.param(tmp_path_factory.mktemp("model"))
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load(folder)


def requests(texts: list[list[int]], first: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(first + i, ids, NUM_TOKENS, ignore_eos=True) for i, ids in enumerate(texts)]


def greedy(folder: Path, prompt: list[int], tokens: list[int]) -> list[int]:
    """What transformers chooses after the same text."""
    (logits,) = oracle_logits(folder, [prompt + tokens])
    chosen: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return chosen


def test_a_shared_prefix_goes_on_from_the_state_after_its_last_block(folder: Path, model: CausalModel) -> None:
    server = LocalServer(model, block_size=8)
    common = prompts(320)[4]
    texts = [[*common, 7], [*common, 8, 9], common[:40], common[:41]]
    for request, text in zip(requests(texts), texts, strict=True):
        tokens = server.run([request])[request.id]
        assert tokens == greedy(folder, text, tokens)
    assert [server.outputs[i][0].num_cached for i in range(4)] == [0, 64, 32, 40]


def test_preemption_changes_nothing(model: CausalModel) -> None:
    texts = prompts(320)
    tight = LocalServer(model, num_blocks=22, block_size=8, step_tokens=24)
    assert tight.run(requests(texts)) == LocalServer(model).run(requests(texts))
    assert tight.scheduler.stats.preemptions > 0


def test_steps_in_graphs_have_the_same_tokens(model: CausalModel) -> None:
    """Their steps are filled up with padding, which must change no state."""
    texts = prompts(320)[:6]
    server = GraphedServer(model, block_size=8, step_tokens=24)
    assert server.run(requests(texts)) == LocalServer(model).run(requests(texts))
    assert server.steps_without == []


def test_states_come_back_from_host_memory(model: CausalModel) -> None:
    texts = prompts(320)
    bytes_of_two = 64 * model.kv_shape.block_bytes(8)
    server = LocalServer(model, num_blocks=20, block_size=8, host_bytes=bytes_of_two)
    expected = LocalServer(model).run(requests(texts))
    for first in (0, 100):  # the second time most of it has been evicted
        for request in requests(texts, first):
            assert server.run([request])[request.id] == expected[request.id - first]
    assert server.scheduler.stats.cached_tokens > 0


def test_a_step_that_failed_is_not_computed_again(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that it had changed would change twice."""
    server, calls = LocalServer(model), 0
    forward = server.engine.model.forward

    def fail(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        forward(*args)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(server.engine.model, "forward", fail)
    with pytest.raises(Exception, match="Out of memory"):
        server.run(requests([[1, 2, 3, 4]]))
    assert calls == 1


def test_drafts_are_refused(folder: Path) -> None:
    options = ServerOptions(model_id=str(folder), device="cpu", dtype="float32", speculate=2)
    with pytest.raises(OptionError, match=r"--speculate.*(mamba|qwen3_next)"):
        load_files(ModelFiles.open(folder), options)


def test_another_dtype_is_for_keys_and_values_only(tmp_path: Path) -> None:
    options = ServerOptions(device="cpu", dtype="float32", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(OptionError, match=r"--kv-cache-dtype.*mamba"):
        Model(load_files(ModelFiles.open(tiny_mamba(tmp_path / "mamba")), options), options)
    hybrid = tiny_qwen3_next(tmp_path / "hybrid")
    shard = Model(load_files(ModelFiles.open(hybrid), options), options)
    shard.warmup(warmup())
    dtypes = [layer.keys.dtype for layer in shard.engine.cache.layers]
    assert dtypes == [torch.float32] * 3 + [torch.float8_e5m2]


def test_the_servers_blocks_are_those_of_states(folder: Path) -> None:
    options = ServerOptions(device="cpu", dtype="float32")
    shard = Model(load_files(ModelFiles.open(folder), options), options)
    shard.warmup(warmup())
    expected = shard.loaded.model.kv_shape.block_size
    assert expected is not None and shard.info().block_size == shard.engine.cache.block_size == expected
    assert shard.info().use_prefix_caching and shard.info().support_chunking


def test_a_block_is_counted_whole(tmp_path: Path) -> None:
    shape = load(tiny_mamba(tmp_path)).kv_shape
    assert isinstance(shape, StateShape)
    assert shape.block_bytes(16) == shape.block_bytes(256) == 2 * 3 * 96 * 11 * 4
    assert 0 <= shape.bytes_per_token * shape.block_size - shape.block_bytes(256) < 2 * 3 * 4 * shape.block_size


def test_a_block_of_both_kinds_is_counted_whole(tmp_path: Path) -> None:
    shape = load(tiny_qwen3_next(tmp_path)).kv_shape
    assert isinstance(shape, HybridShape)
    states = 3 * (4 * 16 * 12 + (2 * 2 * 16 + 4 * 12) * 3) * 4
    assert shape.block_bytes(16) == states + 16 * 2 * 2 * 24 * 4
    assert 0 <= shape.bytes_per_token * shape.block_size - shape.block_bytes(shape.block_size) < shape.block_size
