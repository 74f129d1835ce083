"""A model in pipeline stages: the same tokens as in one piece, for every family that builds its layers one by one."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legato.cluster.links import TensorLink
from legato.common.errors import UnsupportedModel
from legato.cpu.library import library
from legato.layers.kv_cache import KVCache
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.host import HostDecoder, on_host
from legato.models.registry import CausalModel, get_model
from legato.pb import generate_pb2 as pb
from legato.router.shards import _from_pb, _to_pb
from legato.sampling.sampler import Sampler
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest
from legato.server.engine import Engine
from legato.server.grammars import Grammars
from legato.server.nodes.stage import PipelineStage
from tests.generation import generation, sampling
from tests.models import tiny_hybrid as hybrid
from tests.models import tiny_mamba as mamba
from tests.models import tiny_seeds as seeds
from tests.models import tiny_t5 as t5
from tests.models import tiny_today as today
from tests.server.local import LocalServer, no_grammars
from tests.tiny_models import tiny_llama

CPU = torch.device("cpu")
FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": tiny_llama,
    "gpt2": seeds.tiny_gpt2,
    "bloom": seeds.tiny_bloom,
    "opt": seeds.tiny_opt,
    "falcon": seeds.tiny_falcon,
    "gemma2": today.tiny_gemma2,
    "qwen3": today.tiny_qwen3,
    "olmo2": today.tiny_olmo2,
    "qwen3-next": hybrid.tiny_qwen3_next,
    "mamba": mamba.tiny_mamba,
}


def lost(reason: str) -> None:
    raise AssertionError(reason)


def load(folder: Path, shard: Shard, *, packs: bool = False) -> CausalModel:
    files = ModelFiles.open(folder)
    model = get_model(files, ModelConfig.from_hf(files.config()), torch.float32, CPU, shard=shard, packs=packs)
    return on_host(model) if packs else model


class PipelinedServer(LocalServer):
    """All stages in one process: each step runs through one after the other. Links are socket pairs."""

    def __init__(self, stages: list[CausalModel]) -> None:
        super().__init__(stages[-1])
        self.scheduler = Scheduler(replace(self.scheduler.limits, num_stages=len(stages)))
        ring = [socket.socketpair() for _ in stages]
        behind = [TensorLink(here, 0) for here, _ in ring]
        before = [TensorLink(there, 0) for _, there in [ring[-1], *ring[:-1]]]
        self.engines = []
        for number, model in enumerate(stages):
            shard = Shard(stage=number, num_stages=len(stages))
            stage = PipelineStage(
                shard, before[number], behind[number], model.config.hidden_size, torch.float32, CPU, lost
            )
            if isinstance(model, HostDecoder):
                stage.calibrate(model)
            cache, vocab = KVCache(model.kv_shape, 256, 16, CPU), model.config.vocab_size
            self.engines.append(
                Engine(
                    model, cache, 16, 255 * 16, lambda rows, vocab=vocab: Sampler(vocab, rows, CPU),
                    Grammars(no_grammars), shard=shard, stage=stage,
                )
            )  # fmt: skip

    def step(self) -> bool:
        while self.scheduler.num_in_flight < self.scheduler.limits.max_in_flight:
            if (plan := self.scheduler.plan()) is None:
                break
            pending = [engine.launch(_to_pb(plan)) for engine in self.engines]
            assert all(each.read().token_ids == [] for each in pending[:-1])
            self._waiting.append(pending[-1])
        if not self._waiting:
            return False
        response: pb.StepResponse = self._waiting.pop(0).read()
        for request_id, output in self.scheduler.complete(_from_pb(response)):
            assert output.error is None, output.error
            self.outputs[request_id].append(output)
        return True


def requests(vocab: int) -> list[GenerationRequest]:
    """Greedy and sampled ones, some with log probabilities of their prompt."""
    rng = random.Random(5)
    made = []
    for number, length in enumerate((1, 5, 16, 40, 3, 33, 12, 25)):
        prompt = [rng.randrange(3, vocab) for _ in range(length)]
        parameters = sampling(do_sample=True, seed=number, temperature=0.9, repetition_penalty=1.3)
        more = {"parameters": parameters} if number % 2 else {"prompt_logprobs": number % 4 == 0}
        made.append(generation(number, prompt, 12, ignore_eos=True, **more))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_generate_the_same_tokens(tmp_path: Path, family: str) -> None:
    folder = FAMILIES[family](tmp_path)
    whole = load(folder, Shard())
    asked = requests(min(whole.config.vocab_size, 300))
    expected = LocalServer(whole).run(asked)
    num_stages = min(3, whole.config.num_layers)
    stages = [load(folder, Shard(stage=number, num_stages=num_stages)) for number in range(num_stages)]
    assert sum(stage.kv_shape.num_layers for stage in stages) == whole.config.num_layers
    assert PipelinedServer(stages).run(asked, random.Random(1)) == expected


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("tied", [True, False])
def test_packed_stages_run_in_the_library_and_generate_the_same_tokens(tmp_path: Path, tied: bool) -> None:
    folder = tiny_llama(tmp_path, hidden_size=128, intermediate_size=256, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=32, num_hidden_layers=4,
                        tie_word_embeddings=tied)  # fmt: skip
    whole = load(folder, Shard(), packs=True)
    stages = [load(folder, Shard(stage=number, num_stages=2), packs=True) for number in range(2)]
    assert all(isinstance(model, HostDecoder) for model in (whole, *stages))
    asked = requests(300)
    assert PipelinedServer(stages).run(asked) == LocalServer(whole).run(asked)


def test_a_family_that_runs_its_layers_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be divided into 2 pipeline stages"):
        load(t5.tiny_t5(tmp_path), Shard(num_stages=2))


def test_a_stage_has_only_its_own_weights(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    first, last = (load(folder, Shard(stage=number, num_stages=2)) for number in range(2))
    assert not hasattr(first.head, "weight")  # type: ignore[attr-defined]
    assert not hasattr(last.embedding, "weight")  # type: ignore[attr-defined]


def test_a_stage_behind_one_without_the_library_does_not_calibrate(tmp_path: Path) -> None:
    """It may have no C compiler on its machine. What it sends is taken from the link all the same."""
    folder = tiny_llama(tmp_path)
    stages = [load(folder, Shard(stage=number, num_stages=2)) for number in range(2)]
    server = PipelinedServer(stages)
    for engine, model in zip(server.engines, stages, strict=True):
        assert engine.stage is not None
        engine.stage.calibrate(model)
    asked = requests(300)
    assert server.run(asked) == LocalServer(load(folder, Shard())).run(asked)
