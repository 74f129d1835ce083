"""Shards that embed texts: how large their steps are, and what HTTP must know of them.

Texts are scheduled like prompts: queue, limits, shares of tenants and recovery are the same. A step computes them whole
and returns a vector for each.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from legato.common.errors import OptionError
from legato.common.options import RouterOptions
from legato.ipc.settings import EmbeddingSettings
from legato.modelfiles.embedding import EmbeddingFiles
from legato.modelfiles.files import ModelFiles
from legato.pb import generate_pb2 as pb
from legato.router.shards import GrpcShards, WarmupLimits
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import ModelLimits

logger = logging.getLogger(__name__)

# Tokens of a step. More fill a GPU; on a CPU activations should stay in the caches.
STEP_TOKENS = {"cuda": 32768, "cpu": 2048}
# Texts of a step. They take no memory of their own.
MAX_ROWS = 512
# What a step may take of the time that warm-up estimates: attention over long texts takes longer than that over short
# ones, and a CPU may have other work.
SLOWER = 4.0
# Limits of generation.
NO_EFFECT = {"max_total_tokens", "max_batch_total_tokens"}
# Texts that one request may have, unless --max-client-batch-size says otherwise: the limit of OpenAI's API.
CLIENT_BATCH_SIZE = 2048


async def warm_up_embedding(
    shards: GrpcShards, info: pb.InfoResponse, options: RouterOptions
) -> tuple[Scheduler, ModelLimits]:
    started = time.perf_counter()
    rows = min(options.max_batch_size or MAX_ROWS, options.max_concurrent_requests)
    longest = longest_text(info, options)
    budget = options.max_batch_prefill_tokens or STEP_TOKENS.get(info.device_type, STEP_TOKENS["cpu"])
    # The scheduler wants room for the longest beside a token of every row.
    step_tokens = max(budget, longest + rows)
    found = await shards.warmup(WarmupLimits(longest, None, step_tokens, None, rows))
    limits = ModelLimits(
        max_input_tokens=found.max_input_tokens,
        max_total_tokens=found.max_total_tokens,
        max_batch_total_tokens=step_tokens,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        has_encoder=True,
        longest_step=SLOWER * found.max_step_ms / 1e3,
    )
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=found.num_blocks,
            block_size=info.block_size,
            max_rows=found.max_rows,
            max_step_tokens=step_tokens,
            prefix_caching=False,
            queue_timeout=options.queue_timeout,
            request_timeout=options.request_timeout,
            max_requests=options.max_concurrent_requests,
            max_queued_tokens=options.max_queued_tokens,
            vocab_size=info.vocab_size,
            embeds=True,
        )
    )
    fields = {"warmup_seconds": round(time.perf_counter() - started, 2), "max_input_tokens": found.max_input_tokens}
    logger.info("Connected to the shards", extra={"fields": fields | {"max_batch_tokens": step_tokens}})
    return scheduler, limits


def longest_text(info: pb.InfoResponse, options: RouterOptions) -> int:
    """In tokens."""
    wanted, most = options.max_input_tokens, info.max_position_embeddings
    if wanted is not None and wanted > most:
        raise OptionError(f"--max-input-tokens {wanted}: the model has positions for {most} tokens")
    return wanted or info.embedding.max_tokens


def embedding_settings(info: pb.InfoResponse, options: RouterOptions, model: Path) -> EmbeddingSettings | None:
    """None: the shards generate."""
    if not info.HasField("embedding"):
        return None
    described = EmbeddingFiles.read(ModelFiles.open(model))
    for name in NO_EFFECT & options.given:
        logger.warning("--%s has no effect with --task embed", name.replace("_", "-"))
    return EmbeddingSettings(
        size=info.embedding.size,
        pooling=info.embedding.pooling,
        dtype=info.dtype,
        normalized=described.normalized,
        prompts=described.prompts or {},
        default_prompt=described.default_prompt,
        labels=described.labels,
        max_client_batch_size=options.max_client_batch_size or CLIENT_BATCH_SIZE,
    )
