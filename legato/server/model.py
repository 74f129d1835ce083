"""A loaded model with its cache and its rows: what the service calls. The words are those of TGI's server."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import grpc
import torch

from legato.common.milestones import WARM, WARMING
from legato.common.options import ServerOptions
from legato.layers.kv_cache import KVCache
from legato.pb import generate_pb2 as pb
from legato.sampling.sampler import Sampler
from legato.server.engine import Engine
from legato.server.grammars import Grammars, load_trie
from legato.server.interceptor import RequestRefused
from legato.server.loading import LoadedModel
from legato.server.memory import available_for_cache

logger = logging.getLogger(__name__)

# Rows and tokens of a shard that nobody sized: enough for a client that calls Warmup with nothing in it.
DEFAULT_ROWS = 128
RESERVED_BLOCKS = 1  # block 0 takes the writes of padded rows


@dataclass(frozen=True, slots=True)
class Capacity:
    """What warm-up found room for."""

    num_blocks: int
    max_rows: int
    max_input_tokens: int
    max_total_tokens: int
    max_prefill_tokens: int


class NotWarm(RequestRefused):
    def __init__(self) -> None:
        super().__init__("the shard is not warmed up yet: call Warmup first", grpc.StatusCode.FAILED_PRECONDITION)


class Model:
    def __init__(self, loaded: LoadedModel, options: ServerOptions) -> None:
        self.loaded = loaded
        self.options = options
        self.block_size = options.block_size
        self.eos_token_ids = loaded.files.eos_token_ids()
        self.grammars = Grammars(lambda: load_trie(loaded.files, loaded.model.config.vocab_size))
        self._engine: Engine | None = None
        self._capacity: Capacity | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise NotWarm
        return self._engine

    @property
    def capacity(self) -> Capacity:
        if self._capacity is None:
            raise NotWarm
        return self._capacity

    def info(self) -> pb.InfoResponse:
        config = self.loaded.model.config
        return pb.InfoResponse(
            requires_padding=False,
            dtype=f"torch.{str(self.loaded.dtype)[6:]}",
            device_type=self.loaded.device.type,
            speculate=0,
            support_chunking=True,
            use_prefix_caching=self.options.prefix_caching,
            attention_impl="paged",
            block_size=self.block_size,
            eos_token_ids=self.eos_token_ids,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_positions,
            model_type=config.model_type,
        )

    def warmup(self, request: pb.WarmupRequest) -> Capacity:
        """Size the cache by the memory that is left, allocate it, and run a first step so that no request has to."""
        started = time.perf_counter()
        logger.info(WARMING)
        self._engine = self._capacity = None  # a second warm-up replaces the first cache instead of standing beside it
        capacity = self._measure(request)
        shape, device = self.loaded.model.kv_shape, self.loaded.device
        cache = KVCache(shape, capacity.num_blocks, self.block_size, device)
        self._engine = Engine(
            self.loaded.model,
            cache,
            capacity.max_rows,
            capacity.max_total_tokens,
            self._make_sampler,
            self.grammars,
            self.options.cuda_graphs,
        )
        self._first_step(capacity)
        self._capacity = capacity
        logger.info(
            WARM,
            extra={
                "fields": {
                    "seconds": round(time.perf_counter() - started, 2),
                    "kv_blocks": capacity.num_blocks,
                    "kv_gib": round(capacity.num_blocks * self.block_size * shape.bytes_per_token / 2**30, 2),
                    "max_total_tokens": capacity.max_total_tokens,
                }
            },
        )
        return capacity

    def _measure(self, request: pb.WarmupRequest) -> Capacity:
        config, shape = self.loaded.model.config, self.loaded.model.kv_shape
        longest = min(request.max_total_tokens or config.max_positions, config.max_positions)
        if longest < 2:
            raise RequestRefused(f"max_total_tokens is {longest}: a prompt and an answer are at least 2 tokens")
        max_rows = request.max_rows or DEFAULT_ROWS
        budget = available_for_cache(self.loaded.device, self.options.cuda_memory_fraction)
        # Memory is cut to whole blocks, wishes are rounded up to them.
        usable = min(budget // (shape.bytes_per_token * self.block_size), max_rows * self._blocks(longest))
        if request.max_batch_total_tokens:
            usable = min(usable, self._blocks(request.max_batch_total_tokens))
        if request.max_total_tokens and usable < self._blocks(longest):
            raise RequestRefused(
                f"Not enough memory to handle `max_total_tokens={longest}`: the KV cache has room for"
                f" {usable * self.block_size} tokens. Lower --max-total-tokens or raise --max-batch-total-tokens"
            )
        if usable < 1:
            raise RequestRefused("Not enough memory for a single block of the KV cache")
        total = min(longest, usable * self.block_size)
        return Capacity(
            num_blocks=usable + RESERVED_BLOCKS,
            max_rows=max_rows,
            max_input_tokens=min(request.max_input_tokens or total - 1, total - 1),
            max_total_tokens=total,
            max_prefill_tokens=request.max_prefill_tokens,
        )

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _make_sampler(self, max_rows: int) -> Sampler:
        watermark = {
            "watermark_gamma": self.options.watermark_gamma,
            "watermark_delta": self.options.watermark_delta,
        }
        given = {name: value for name, value in watermark.items() if value is not None}
        return Sampler(self.loaded.model.config.vocab_size, max_rows, self.loaded.device, **given)

    def _first_step(self, capacity: Capacity) -> None:
        """One prompt of a few tokens and one decode: both paths have run once before anybody waits for them."""
        length = min(8, capacity.max_total_tokens - 1)
        blocks = list(range(1, 1 + self._blocks(length + 1)))
        prompt = pb.StepRequest(
            admitted=[pb.Admission(row=0, input_ids=[0] * length)],
            rows=[0], num_tokens=[length], num_new_blocks=[len(blocks)], new_blocks=blocks,
        )  # fmt: skip
        self.engine.launch(prompt).read()
        self.engine.launch(pb.StepRequest(rows=[0], num_tokens=[1], num_new_blocks=[0])).read()
        if self.loaded.device.type == "cuda":
            torch.cuda.synchronize()
