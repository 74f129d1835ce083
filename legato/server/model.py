"""A loaded model with its KV cache and its rows, as the service calls it. Named after TGI's `Model`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import grpc
import torch

from legato.common.errors import OptionError
from legato.common.gc import unfreeze_gc
from legato.common.options import DEFAULT_DRAFTS, ServerOptions
from legato.common.progress import WARMED_UP, WARMING_UP
from legato.kernels.compilation.ahead import can_compile_ahead
from legato.kernels.compilation.start import CompilerStart
from legato.layers.kv_cache import KVCache, KVShape, check_dtype_option
from legato.models.registry import LimitedModel
from legato.models.vision import CrossModel, MutualModel
from legato.pb import generate_pb2 as pb
from legato.sampling.sampler import Sampler
from legato.scheduling.limits import most_sampled
from legato.server.adapters import open_adapters
from legato.server.engine import Engine
from legato.server.grammars import Grammars, load_trie
from legato.server.graphs.captures import kept_rows, mixed_sizes
from legato.server.interceptor import RequestRefused
from legato.server.loading import LoadedModel
from legato.server.memory.allocator import release_blocks, return_freed_memory, use_small_pages
from legato.server.memory.budget import (
    OutOfMemory,
    available_ram,
    cache_budget,
    graph_bytes,
    host_budget,
    measure,
    refused_for_memory,
)
from legato.server.memory.capacity import DEFAULT_ROWS, RESERVED_BLOCKS, Capacity, RequestedLimits, gib
from legato.server.memory.offload import HostBlockStore
from legato.server.memory.warmup import compile_ahead, decode_step, first_step, full_step, ordinary_steps
from legato.server.speculation.draft_model import MOST_TOKENS, num_spare_blocks
from legato.server.speculation.loading import why_no_drafts
from legato.vision.cross import ALIGNMENT
from legato.vision.gemma import SquareRules
from legato.vision.rules import image_rules

logger = logging.getLogger(__name__)

# KV blocks for measuring the largest step: all rows write to the same one.
WARMUP_BLOCKS = 2
MB = 10**6
# What cached prefixes may take on a CPU beside the smallest models.
LEAST_PREFIX_CACHE = 128 * MB
# Guesses of a draft model, each of which it has to compute.
DEFAULT_GUESSES = 4
# Of each logit that is sampled from: itself, and what sampling makes of it in float32.
LOGIT_BYTES = 24
CACHE_DTYPES = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class NotWarm(RequestRefused):
    def __init__(self) -> None:
        super().__init__("the shard is not warmed up yet: call Warmup first", grpc.StatusCode.FAILED_PRECONDITION)


class Model:
    def __init__(
        self,
        loaded: LoadedModel,
        options: ServerOptions,
        advance: Callable[[], None] = lambda: None,
        compiler: CompilerStart | None = None,
    ) -> None:
        """`advance` is called after every step of warm-up. The first warm-up closes `compiler`."""
        self.loaded = loaded
        self._advance = advance
        self._compiler = compiler
        self.options = options
        shape = loaded.model.kv_shape
        self.block_size = options.block_size if shape.block_size is None else shape.block_size
        check_dtype_option(options.kv_cache_dtype, shape, loaded.model.config.model_type)
        self.eos_token_ids = loaded.files.eos_token_ids()
        self.grammars = Grammars(lambda: load_trie(loaded.files, loaded.model.config.vocab_size))
        self.image_rules = image_rules(loaded.files)
        if isinstance(loaded.model, CrossModel) and ALIGNMENT % options.block_size:
            raise OptionError(f"--block-size is {options.block_size}: for this model it must divide {ALIGNMENT}")
        self.adapters = open_adapters(loaded, options)
        self._engine: Engine | None = None
        self._capacity: Capacity | None = None
        self._has_compiled = False
        self.host_blocks: HostBlockStore | None = None
        # Seconds of the stages of warm-up, for its log line.
        self._stages: dict[str, float] = {}

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

    @property
    def decoder_start_token_id(self) -> int | None:
        """Of encoder-decoder models: the token after a prompt, which is then computed whole and never shared."""
        return self.loaded.model.config.decoder_start_token_id

    @property
    def whole_prompts(self) -> bool:
        """An encoder reads a prompt at once, and so does a model whose tokens of a prompt see each other: every state
        depends on all of them."""
        model = self.loaded.model
        return self.decoder_start_token_id is not None or (isinstance(model, MutualModel) and model.whole_prompts)

    @property
    def _whole_image_tokens(self) -> int:
        rules = self.image_rules
        return len(rules.ids) if isinstance(self.loaded.model, MutualModel) and isinstance(rules, SquareRules) else 0

    @property
    def alone(self) -> bool:
        """Whether this shard is the whole model: then it need not stay in sync with others."""
        return self.loaded.shard.is_alone

    def info(self) -> pb.InfoResponse:
        config = self.loaded.model.config
        graphs = None if self._engine is None else self._engine.graphs
        return pb.InfoResponse(
            requires_padding=False,
            dtype=f"torch.{str(self.loaded.dtype)[6:]}",
            device_type=self.loaded.device.type,
            speculate=self.num_proposals if self.options.speculate is None else self.options.speculate,
            max_drafts=self.max_drafts,
            num_proposals=self.num_proposals,
            support_chunking=not self.whole_prompts,
            use_prefix_caching=self.options.prefix_caching and not self.whole_prompts,
            whole_image_tokens=self._whole_image_tokens,
            attention_impl="paged",
            block_size=self.block_size,
            eos_token_ids=self.eos_token_ids,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_positions,
            model_type=config.model_type,
            decoder_start_token_id=config.decoder_start_token_id,
            num_uncaptured=0 if graphs is None else graphs.num_pending,
            adapters=[] if self.adapters is None else self.adapters.infos,
            num_adapter_pages=0 if self.adapters is None else self.adapters.device.num_pages,
            num_stages=self.loaded.shard.num_stages,
        )

    @property
    def max_drafts(self) -> int:
        """Of a row in a step: what `--speculate` says, else as many as a speculator or a draft model can guess. Those
        from text that is there need neither."""
        if self.options.speculate is not None:
            return self.options.speculate
        can_verify = why_no_drafts(self.loaded.model, self.options) is None
        return self.num_proposals or (DEFAULT_DRAFTS if can_verify else 0)

    @property
    def num_proposals(self) -> int:
        """Guesses that the shard can make itself behind a sampled token."""
        if self.loaded.draft is not None:
            return DEFAULT_GUESSES if self.options.speculate is None else min(self.options.speculate, MOST_TOKENS)
        return 0 if self.loaded.speculator is None else self.loaded.speculator.num_tokens

    @property
    def kv_shape(self) -> KVShape:
        """The model's, with the dtype of `--kv-cache-dtype`."""
        shape, chosen = self.loaded.model.kv_shape, self.options.kv_cache_dtype
        return shape if chosen is None else replace(shape, dtype=CACHE_DTYPES[chosen])

    @property
    def token_bytes(self) -> int:
        """Of the KV cache, for each token, with what the draft model has of it."""
        draft = self.loaded.draft
        return self.kv_shape.bytes_per_token + (0 if draft is None else draft.bytes_per_token)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Of decodes to capture, as `--cuda-graphs` has them: () for every size that comes up, (0,) for none. The torch
        versions of our kernels read lengths on the host, which a capture cannot."""
        can_capture = self.loaded.model.can_capture and not self.options.disable_custom_kernels
        can_capture = can_capture and self.loaded.stage is None  # whose steps begin with what comes over a link
        return self.options.cuda_graphs if can_capture else (0,)

    def touch(self) -> None:
        """Have the device add two numbers, and wait for the sum."""
        torch.ones(2, device=self.loaded.device).sum().item()

    def warmup(self, request: pb.WarmupRequest) -> Capacity:
        """Size the KV cache by the memory that is left, allocate it, and run the first steps."""
        with nullcontext() if self.loaded.stage is None else self.loaded.stage.pretended():
            return self._warm_up(request)

    def _warm_up(self, request: pb.WarmupRequest) -> Capacity:
        started = time.perf_counter()
        self._stages = {}
        logger.info(WARMING_UP)
        self._advance()
        if self._engine is not None:  # a second warm-up replaces the first cache
            unfreeze_gc()
        self._engine = self._capacity = None
        self._open_host_blocks()
        request = self._with_defaults(request)
        max_positions = self.loaded.model.config.max_positions
        token_bytes = self.token_bytes
        requested = RequestedLimits(request, max_positions, self.block_size, token_bytes)
        # Shards agree on what the one with the least memory can hold.
        room = self._budget(requested) - self._spare_bytes(requested)
        budget = self.loaded.shard.least(room // token_bytes, self.loaded.device) * token_bytes
        capacity = requested.fit(budget)
        if isinstance(self.loaded.model, LimitedModel):
            self.loaded.model.limit(capacity.max_total_tokens)
        if self.loaded.draft is not None:
            self.loaded.draft.limit(capacity.max_total_tokens)
        size = gib(capacity.num_blocks * self.block_size * token_bytes)
        refused = f"no {size} for the KV cache; lower --cuda-memory-fraction"
        with refused_for_memory(refused, self.loaded.device), self._stage("allocate_seconds"):
            self._engine = self._make_engine(capacity.num_blocks, requested, capacity.max_total_tokens)
        if self.loaded.device.type == "cpu":
            for cache in self.engine.caches:
                use_small_pages(cache)
        self._first_steps(capacity)
        self._capacity = capacity
        self.release_blocks(range(RESERVED_BLOCKS, capacity.num_blocks))
        fields = {
            "seconds": round(time.perf_counter() - started, 2),
            **{name: round(seconds, 2) for name, seconds in self._stages.items()},
            "kv_blocks": capacity.num_blocks,
            "kv_cache": size,
            "room": gib(budget),
            "max_total_tokens": capacity.max_total_tokens,
            "max_drafts": self.max_drafts,
        }
        logger.info(WARMED_UP, extra={"fields": fields})
        return capacity

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._stages[name] = self._stages.get(name, 0.0) + time.perf_counter() - started

    @property
    def max_unused_blocks(self) -> int | None:
        """What `--prefix-cache-mb` allows. By default prefixes on a CPU take about as much memory as the weights."""
        given, block_bytes = self.options.prefix_cache_mb, self.token_bytes * self.block_size
        if given is None and self.loaded.device.type != "cpu":
            return None
        room = LEAST_PREFIX_CACHE if given is None else given * MB
        if given is None and self.options.load_format == "auto":
            room = max(room, sum(file.stat().st_size for file in self.loaded.files.weight_files()))
        return room // block_bytes

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Give the memory of KV blocks back to the system, and what else is free, where the system has the memory."""
        if not all(RESERVED_BLOCKS <= block < self.capacity.num_blocks for block in blocks):
            raise RequestRefused(f"blocks: they must be from {RESERVED_BLOCKS} to {self.capacity.num_blocks - 1}")
        if self.loaded.device.type == "cpu":
            for cache in self.engine.caches:
                release_blocks(cache, blocks)
            return_freed_memory()

    def _with_defaults(self, request: pb.WarmupRequest) -> pb.WarmupRequest:
        """The limits that the caller does not name: TGI's router does not know of `max_rows`."""
        named = pb.WarmupRequest()
        named.CopyFrom(request)
        named.max_rows = request.max_rows or self.options.max_batch_size or DEFAULT_ROWS
        if not request.max_input_tokens and self.options.max_input_tokens is not None:
            named.max_input_tokens = self.options.max_input_tokens
        return named

    def _open_host_blocks(self) -> None:
        """Before memory is measured, since part of it is on the device. A new router finds the memory of the last."""
        gigabytes, shard = self.options.kv_offload_gb, self.loaded.shard
        if not gigabytes or self.host_blocks is not None or self.decoder_start_token_id is not None:
            return
        if self.loaded.draft is not None:  # whose own keys and values would not come back with a block
            raise RequestRefused("--kv-offload-gb cannot be combined with a draft model; leave out one of them")
        # Blocks are not equally large where heads do not divide evenly; their numbers are those of all shards.
        block_bytes = self.kv_shape.block_bytes(self.block_size)
        num_slots = shard.least(int(gigabytes * 1e9) // shard.num_on_machine // block_bytes, self.loaded.device)
        num_bytes = num_slots * block_bytes
        refused = f"no {gib(num_bytes)} of host memory for blocks of evicted prefixes; lower --kv-offload-gb"
        if num_bytes > available_ram():
            raise OutOfMemory(refused)
        with refused_for_memory(refused, self.loaded.device), self._stage("host_memory_seconds"):
            self.host_blocks = HostBlockStore(self.kv_shape, self.block_size, num_bytes, self.loaded.device)

    def _budget(self, requested: RequestedLimits) -> int:
        """Bytes for the KV cache."""
        device, fraction = self.loaded.device, self.options.cuda_memory_fraction
        if device.type == "cpu":
            return host_budget(fraction / self.loaded.shard.num_on_machine)  # all shards live in the same memory
        tokens, rows = requested.step_tokens, requested.max_rows
        lost = f"a step of {tokens} tokens in {rows} rows does not fit beside the weights"
        cure = "lower --max-batch-prefill-tokens or --max-concurrent-requests"
        with refused_for_memory(f"{lost}; {cure}", device):
            reading = measure(lambda: self._run_largest_steps(requested), device)
        kept = [] if self.graph_sizes == (0,) else kept_rows(rows, self.graph_sizes, drafts=self.max_drafts > 0)
        if self.adapters is not None:
            kept *= 2  # each with adapters, too
        largest, layers = mixed_sizes(rows)[-1], self.loaded.model.config.num_layers
        # Of every row a graph keeps the logits, the token and its log probability.
        row_bytes = self.loaded.model.config.vocab_size * self.loaded.dtype.itemsize + 12
        if self.loaded.speculator is not None:  # and the state that it goes on from
            row_bytes += self.loaded.model.config.hidden_size * self.loaded.dtype.itemsize
        graphs = graph_bytes(kept, largest, layers, row_bytes, tokens, reading.peak - reading.reserved)
        if self.max_drafts:
            graphs += (most_sampled(rows) - rows) * self.loaded.model.config.vocab_size * LOGIT_BYTES
        logger.info(
            "Memory measured",
            extra={
                "fields": {
                    "device": gib(reading.total),
                    "others": gib(reading.others),
                    "weights": gib(reading.reserved),
                    "largest_step": gib(reading.peak - reading.reserved),
                    "graphs": gib(graphs),
                }
            },
        )
        return cache_budget(reading, fraction, graphs)

    def _spare_bytes(self, requested: RequestedLimits) -> int:
        """What a draft model keeps beside the router's blocks."""
        if self.loaded.draft is None:
            return 0
        tokens = requested.max_rows * num_spare_blocks(self.num_proposals, self.block_size) * self.block_size
        return tokens * self.loaded.draft.kv_shape.bytes_per_token

    def _run_largest_steps(self, requested: RequestedLimits) -> None:
        """The largest step that a router may send, and some common ones, in a temporary engine. The common ones launch
        no kernels the first time, where these can be compiled meanwhile."""
        if not self._has_compiled and can_compile_ahead() and not self.options.disable_custom_kernels:
            with self._stage("compile_seconds"):
                engine = self._make_engine(WARMUP_BLOCKS, requested, requested.longest)
                compile_ahead(engine, requested, self._compiler)
                del engine
            self._has_compiled, common = True, []
            self._advance()
        else:
            common = list(ordinary_steps(requested))
        engine = self._make_engine(WARMUP_BLOCKS, requested, requested.longest, graphs=False)
        if engine.vision_encoder is not None:
            engine.vision_encoder.encode_largest(requested.longest)
        pretended = nullcontext() if self.adapters is None else self.adapters.pretended()
        with pretended, self._stage("largest_step_seconds"):
            engine.launch(full_step(requested, with_adapters=self.adapters is not None)).read()
            self._advance()
        for step in common:
            engine.launch(step).read()
            self._advance()

    def _make_engine(self, num_blocks: int, requested: RequestedLimits, longest: int, graphs: bool = True) -> Engine:
        cache = KVCache(self.kv_shape, num_blocks, self.block_size, self.loaded.device)
        sizes = self.graph_sizes if graphs else (0,)
        return Engine(
            self.loaded.model, cache, requested.max_rows, longest, self._make_sampler, self.grammars, sizes,
            self.loaded.shard, self.image_rules, self.loaded.speculator, self.loaded.draft,
            drafts=self.num_proposals or self.max_drafts, adapters=self.adapters, host_blocks=self.host_blocks,
            stage=self.loaded.stage,
        )  # fmt: skip

    def _make_sampler(self, max_rows: int) -> Sampler:
        watermark = {
            "watermark_gamma": self.options.watermark_gamma,
            "watermark_delta": self.options.watermark_delta,
        }
        given = {name: value for name, value in watermark.items() if value is not None}
        return Sampler(self.loaded.model.config.vocab_size, max_rows, self.loaded.device, **given)

    def _first_steps(self, capacity: Capacity) -> None:
        """One prompt, the first CUDA graphs and one decode: everything has run once before the first request. The
        decode runs with a graph, as all decodes will: eagerly it would need kernels that nothing else needs."""
        with self._stage("first_steps_seconds"):
            self.engine.launch(first_step(capacity, self.block_size)).read()
            self._advance()
        if self.engine.graphs is not None:
            with self._stage("graphs_seconds"):
                self.engine.graphs.capture_first()
        with self._stage("first_steps_seconds"):
            self.engine.launch(decode_step()).read()
        if self.loaded.device.type == "cuda":
            torch.cuda.synchronize()
