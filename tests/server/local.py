"""Scheduler and engine in one process, without sockets: what the router and a shard do together, step by step."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import torch

from legato.grammar.vocabulary import TokenTrie
from legato.layers.kv_cache import KVCache
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.registry import CausalModel, get_model
from legato.models.speculators import Speculator
from legato.models.vision import MutualModel
from legato.router.shards import _from_pb, _to_pb
from legato.sampling.sampler import Sampler
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, Output
from legato.server.adapters import ShardAdapters
from legato.server.engine import Engine
from legato.server.grammars import Grammars
from legato.server.memory.offload import HostBlockStore
from legato.server.speculation.guessers import Guesser

# `make test-gpu` runs the same tests on a GPU.
DEVICE = torch.device(os.environ.get("LEGATO_TEST_DEVICE", "cpu"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalModel:
    files = ModelFiles.open(folder)
    return get_model(files, ModelConfig.from_hf(files.config()), dtype, DEVICE)


def no_grammars() -> TokenTrie:
    raise AssertionError("this test has no grammars")


class LocalServer:
    def __init__(
        self, model: CausalModel, *, num_blocks: int = 256, block_size: int = 16, max_rows: int = 16,
        step_tokens: int = 512, prefix_caching: bool = True, eos: frozenset[int] = frozenset(),
        load_trie: Callable[[], TokenTrie] = no_grammars, speculate: int = 0, speculator: Speculator | None = None,
        adapters: ShardAdapters | None = None, draft: Guesser | None = None, host_bytes: int = 0,
    ) -> None:  # fmt: skip
        start, mutual = model.config.decoder_start_token_id, isinstance(model, MutualModel)
        whole = isinstance(model, MutualModel) and model.whole_prompts
        limits = SchedulerLimits(
            num_blocks, block_size, max_rows, step_tokens, eos, prefix_caching and start is None and not whole,
            decoder_start_token_id=start, whole_prompts=whole, whole_images=mutual and not whole,
            speculate=speculate, vocab_size=model.config.vocab_size,
            num_proposals=speculate if draft is not None else 0 if speculator is None else speculator.num_tokens,
            num_adapter_pages=0 if adapters is None else adapters.device.num_pages,
            num_host_blocks=host_bytes // model.kv_shape.block_bytes(block_size),
        )  # fmt: skip
        cache = KVCache(model.kv_shape, num_blocks, block_size, DEVICE)
        vocab = model.config.vocab_size
        self.scheduler = Scheduler(limits)
        self.engine = Engine(
            model, cache, max_rows, limits.max_tokens, lambda rows: Sampler(vocab, rows, DEVICE), Grammars(load_trie),
            adapters=adapters,
            host_blocks=HostBlockStore(model.kv_shape, block_size, host_bytes, DEVICE) if host_bytes else None,
            speculator=speculator,
            draft=draft,
            drafts=speculate,
        )  # fmt: skip
        self.outputs: dict[int, list[Output]] = {}
        self._waiting: list = []

    def submit(self, request: GenerationRequest) -> None:
        self.outputs[request.id] = []
        self.scheduler.submit(request)

    def step(self) -> bool:
        """Keep two steps in flight, as the router does; finish the older one."""
        while self.scheduler.num_in_flight < 2 and (plan := self.scheduler.plan()) is not None:
            self._waiting.append(self.engine.launch(_to_pb(plan)))
        if not self._waiting:
            return False
        for request_id, output in self.scheduler.complete(_from_pb(self._waiting.pop(0).read())):
            assert output.error is None, output.error
            self.outputs[request_id].append(output)
        return True

    def run(
        self, requests: list[GenerationRequest], arrivals: random.Random | None = None, rate: float = 0.2
    ) -> dict[int, list[int]]:
        """All at once, or at random times while others are running: the chance that another comes before a step."""
        todo = list(requests)
        while todo or self.scheduler.running or self.scheduler.queue or self._waiting:
            while todo and (arrivals is None or arrivals.random() < rate):
                self.submit(todo.pop(0))
            self.step()
        return {request.id: self.tokens(request.id) for request in requests}

    def tokens(self, request_id: int) -> list[int]:
        return [output.token_id for output in self.outputs[request_id]]
