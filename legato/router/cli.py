"""`text-generation-router`: waits for the shards, warms them up, then serves HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from legato.common.errors import OptionError
from legato.common.exposure import command_line_warnings, exposure_warnings, tls_context
from legato.common.frontend import vertex_port
from legato.common.heartbeat import send_heartbeats
from legato.common.logging import setup
from legato.common.options import RouterOptions
from legato.common.program import command, run_program
from legato.common.restarts import RestartBudget
from legato.common.tgi_variables import variable_warnings
from legato.cpu.threads import usable_cores
from legato.ipc.api_keys import KeyRights, read_keys, tenant_of
from legato.ipc.messages import WorkerSetup
from legato.ipc.settings import RouterSettings
from legato.modelfiles.hub import DEFAULT_MODEL
from legato.modelfiles.locate import cache_of, locate
from legato.pb import generate_pb2 as pb
from legato.router import model_info
from legato.router.adapters import AdapterRegistry, AdapterRules
from legato.router.embedding import embedding_settings, warm_up_embedding
from legato.router.listening import Listeners
from legato.router.monitoring.dashboard import StepHistory
from legato.router.monitoring.kv_events import KvEventLog, KvEventPublisher
from legato.router.monitoring.metrics_listener import metrics_listener
from legato.router.monitoring.tracing import StepTraces
from legato.router.recovery import ConnectedShards, Recovery
from legato.router.response_store import check_store, response_store
from legato.router.running import RouterProcess
from legato.router.shards import GrpcShards, ShardsLost, WarmupLimits
from legato.router.startup import StartupResponder
from legato.router.step_loop import StepLoop
from legato.router.workers import Workers
from legato.scheduling.blocks import RESERVED_BLOCKS
from legato.scheduling.budget import StepSizes, step_sizes
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import ModelLimits
from legato.telemetry.metrics import Metrics, StepFigures

logger = logging.getLogger(__name__)

# Prompts of one completions request, unless --max-client-batch-size says otherwise. TGI's.
CLIENT_BATCH_SIZE = 4
# Default maximum of HTTP workers: more would wait for the scheduler.
MAX_WORKERS = 8


def run(options: RouterOptions) -> None:
    setup(options.logger_level, options.json_output, "text-generation-router")
    for warning in (*options.warnings, *variable_warnings(os.environ)):
        logger.warning(warning)
    if options.max_input_tokens and options.max_total_tokens and options.max_input_tokens >= options.max_total_tokens:
        raise OptionError("--max-input-tokens must be smaller than --max-total-tokens")
    options = replace(options, port=vertex_port(os.environ) or options.port)
    # Before anything slow: a port in use ends at once.
    listeners = Listeners(options.hostname, options.port, num_workers(options))
    api_keys = read_keys(options.api_key, options.api_key_file)
    if adapter_rules(options) and api_keys and not any(rights.adapters for rights in api_keys.values()):
        raise OptionError(
            "--lora-allow-runtime: no API key may change adapters; write `adapters` after a key in --api-key-file"
        )
    check_store(options.response_store, options.response_store_size)
    tls = tls_context(options.ssl_certfile, options.ssl_keyfile)  # the workers read the files again
    for warning in (*command_line_warnings(), *exposure_warnings(options)):
        logger.warning(warning)
    import uvloop

    uvloop.run(serve(options, listeners, api_keys, tls))


async def serve(
    options: RouterOptions, listeners: Listeners, api_keys: Mapping[str, KeyRights], tls: ssl.SSLContext | None
) -> None:
    model = locate(options)
    workers = Workers(setup_for(options, model), listeners.sockets, options.max_restarts)
    startup = StartupResponder(tls)
    heartbeat = asyncio.create_task(send_heartbeats(startup.enter))
    try:
        await startup.open(listeners)
        await workers.load()
        shards = await connect(options)
        info = await shards.info()
        scheduler, limits = await warm_up(shards, info, options)
        metrics = Metrics(limits)
        traces = StepTraces() if options.otlp_endpoint else None
        history = StepHistory()

        def on_step(step: StepFigures) -> None:
            metrics.step(step)
            history.add(step)
            if steps.events is not None:
                steps.events.flush()

        hang_timeout = max(options.hang_timeout, limits.longest_step)
        steps = StepLoop(scheduler, shards, limits, on_step, hang_timeout=hang_timeout, traces=traces)
        steps.events = kv_events(options, scheduler)
        with response_store(options.response_store, options.response_store_size) as stored:
            settings = replace(settings_for(options, info, api_keys, model), response_store=stored)
            adapters = AdapterRegistry(steps, info.adapters, adapter_rules(options), settings.base_names)
            budget = RestartBudget(options.max_restarts)
            recovery = Recovery(steps, shards, lambda: reconnect(options), budget, adapters)
            router = RouterProcess(steps, recovery, metrics, workers, settings, options.hang_timeout, history, adapters)
            startup.close()
            keys, port = tuple(api_keys), options.prometheus_port
            async with metrics_listener(options.hostname, port, router.scrape, keys, tls):
                await router.run(listeners, options.graceful_termination_timeout)
        await recovery.close()
    finally:
        startup.close()
        heartbeat.cancel()
        workers.kill()


def kv_events(options: RouterOptions, scheduler: Scheduler) -> KvEventLog | None:
    if not options.kv_events and options.kv_events_endpoint is None:
        return None
    endpoint = options.kv_events_endpoint
    return KvEventLog(scheduler, None if endpoint is None else KvEventPublisher(endpoint))


async def connect(options: RouterOptions) -> GrpcShards:
    return await GrpcShards.connect(options.master_shard_uds_path, hang_timeout=options.hang_timeout)


async def reconnect(options: RouterOptions) -> ConnectedShards:
    shards = await connect(options)
    try:
        scheduler, limits = await warm_up(shards, await shards.info(), options)
    except ShardsLost:
        shards.kill()
        await shards.close()
        raise
    return ConnectedShards(shards, scheduler.limits, limits)


async def warm_up(shards: GrpcShards, info: pb.InfoResponse, options: RouterOptions) -> tuple[Scheduler, ModelLimits]:
    if info.HasField("embedding"):
        return await warm_up_embedding(shards, info, options)
    started = time.perf_counter()
    sizes = step_sizes(info.device_type, options.max_batch_prefill_tokens)
    rows = min(options.max_batch_size or sizes.max_rows, options.max_concurrent_requests)
    step_tokens, longest_input = sizes.max_tokens, None
    if not info.support_chunking:
        prompt_tokens = whole_prompt_tokens(sizes, options)
        # Room beside all decodes: a prompt that cannot be chunked would otherwise wait for ever.
        step_tokens, longest_input = prompt_tokens + rows, prompt_tokens - 1
    elif info.whole_image_tokens:
        step_tokens = max(step_tokens, info.whole_image_tokens + rows)
    found = await shards.warmup(
        WarmupLimits(
            options.max_input_tokens, options.max_total_tokens, step_tokens, options.max_batch_total_tokens, rows
        )
    )
    scheduler = Scheduler(scheduler_limits(found, info, options, sizes, step_tokens))
    for warning in reduction_warnings(options, found):
        logger.warning(warning)
    if longest_input is not None and longest_input < found.max_input_tokens:
        logger.warning(
            "Prompts are limited to %d tokens: this model computes a prompt in one step; "
            "--max-batch-prefill-tokens %d would allow %d",
            longest_input,
            found.max_input_tokens + 1,
            found.max_input_tokens,
        )
    limits = ModelLimits(
        max_input_tokens=min(found.max_input_tokens, longest_input or found.max_input_tokens),
        max_total_tokens=found.max_total_tokens,
        max_batch_total_tokens=(found.num_blocks - RESERVED_BLOCKS) * info.block_size,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        has_encoder=decoder_start(info) is not None,
    )
    logger.info(
        "Connected to the shards",
        extra={
            "fields": {
                "warmup_seconds": round(time.perf_counter() - started, 2),
                "max_input_tokens": limits.max_input_tokens,
                "max_total_tokens": limits.max_total_tokens,
                "max_batch_total_tokens": limits.max_batch_total_tokens,
            }
        },
    )
    return scheduler, limits


def reduction_warnings(options: RouterOptions, found: pb.WarmupResponse) -> Iterator[str]:
    """Which of the limits that were asked for are larger than what the shards allow."""
    total, longest = found.max_total_tokens, found.max_input_tokens
    if (options.max_total_tokens or 0) > total:
        yield (
            f"--max-total-tokens {options.max_total_tokens} exceeds the model's {total} positions: sequences are"
            f" limited to {total} tokens; --rope-scaling and --rope-factor extend models with rotary embeddings"
        )
    if (options.max_input_tokens or 0) > longest:
        yield (
            f"--max-input-tokens {options.max_input_tokens} leaves no token to generate: prompt and generated text"
            f" together have at most {total} tokens, so prompts are limited to {longest}"
        )


def scheduler_limits(
    found: pb.WarmupResponse, info: pb.InfoResponse, options: RouterOptions, sizes: StepSizes, step_tokens: int
) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks=found.num_blocks,
        block_size=info.block_size,
        max_rows=found.max_rows,
        max_step_tokens=max(step_tokens, found.max_rows),
        eos_token_ids=frozenset(info.eos_token_ids),
        prefix_caching=info.use_prefix_caching,
        max_unused_blocks=found.max_unused_blocks if found.HasField("max_unused_blocks") else None,
        num_host_blocks=found.num_host_blocks,
        max_prompt_tokens=sizes.max_prompt_tokens,
        max_mixed_tokens=sizes.mixed_tokens,
        most_mixed_tokens=sizes.most_mixed_tokens,
        mixed_step_time=sizes.mixed_time,
        waiting_served_ratio=options.waiting_served_ratio,
        queue_timeout=options.queue_timeout,
        request_timeout=options.request_timeout,
        max_requests=options.max_concurrent_requests,
        max_queued_tokens=options.max_queued_tokens,
        share_prefix_cache=options.share_prefix_cache,
        decoder_start_token_id=decoder_start(info),
        whole_prompts=not info.support_chunking,
        whole_images=info.whole_image_tokens > 0,
        num_adapter_pages=info.num_adapter_pages,
        speculate=info.max_drafts,
        num_proposals=info.num_proposals,
        num_stages=max(info.num_stages, 1),
        vocab_size=info.vocab_size,
    )


def decoder_start(info: pb.InfoResponse) -> int | None:
    """Of encoder-decoder models."""
    return info.decoder_start_token_id if info.HasField("decoder_start_token_id") else None


def adapter_rules(options: RouterOptions) -> AdapterRules | None:
    """None: adapters are those of the start."""
    return AdapterRules(options.lora_allow, options.huggingface_hub_cache) if options.lora_allow_runtime else None


def whole_prompt_tokens(sizes: StepSizes, options: RouterOptions) -> int:
    """Of prompts in one step of a model that cannot compute them in pieces: the longest, and the decoder's first."""
    longest, given = (options.max_input_tokens or 1) + 1, options.max_batch_prefill_tokens
    if given is not None and given < longest:
        raise OptionError(
            f"--max-batch-prefill-tokens is {given}: this model computes a prompt in one step, which needs up to"
            f" {longest}, one more than --max-input-tokens"
        )
    return max(sizes.max_prompt_tokens or sizes.max_tokens, longest)


def vertex_route(environ: Mapping[str, str], name: str) -> str | None:
    """A path that Vertex AI will call."""
    path = environ.get(name) or None
    if path is not None and (not path.startswith("/") or "{" in path):
        raise OptionError(f"{name} is {path!r}: it must be a path that begins with /, without braces")
    return path


def num_workers(options: RouterOptions) -> int:
    """Half of the cores: the scheduler and the shards have work to do, too, and workers wait for theirs."""
    return options.http_workers or min(MAX_WORKERS, max(1, usable_cores() // 2))


def setup_for(options: RouterOptions, model: Path) -> WorkerSetup:
    return WorkerSetup(
        logger_level=options.logger_level,
        json_output=options.json_output,
        model=str(model.absolute()),
        tokenizer_config_path=options.tokenizer_config_path,
        payload_limit=options.payload_limit,
        otlp_endpoint=options.otlp_endpoint,
        otlp_service_name=options.otlp_service_name,
        hub_cache=options.huggingface_hub_cache,
    )


def settings_for(
    options: RouterOptions, info: pb.InfoResponse, api_keys: Mapping[str, KeyRights], model: Path
) -> RouterSettings:
    model_id, has_encoder = options.model_id or DEFAULT_MODEL, info.HasField("decoder_start_token_id")
    build = model_info.BuildInfo.of(os.environ)
    return RouterSettings(
        http_workers=num_workers(options),
        sha=build.sha,
        docker_label=build.docker_label,
        model_id=model_id,
        model_sha=model_info.model_sha(model),
        model_pipeline_tag=model_info.pipeline_tag(
            model, from_hub=not Path(model_id).exists(), has_encoder=has_encoder, cache=cache_of(options)
        ),
        max_concurrent_requests=options.max_concurrent_requests,
        max_best_of=options.max_best_of,
        max_stop_sequences=options.max_stop_sequences,
        max_top_n_tokens=options.max_top_n_tokens,
        max_client_batch_size=options.max_client_batch_size or CLIENT_BATCH_SIZE,
        validation_workers=options.validation_workers,
        grammar_support=not options.disable_grammar_support,
        schema_lenient=options.schema_lenient,
        max_image_bytes=options.max_image_bytes,
        max_image_fetch_size=options.max_image_fetch_size,
        max_image_pixels=options.max_image_pixels,
        image_url_allow=options.image_url_allow,
        payload_limit=options.payload_limit,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        reasoning_budget=options.reasoning_budget,
        response_store_size=options.response_store_size,
        ssl_certfile=_absolute(options.ssl_certfile),
        ssl_keyfile=_absolute(options.ssl_keyfile),
        cors_allow_origin=options.cors_allow_origin,
        api_keys=tuple(api_keys),
        route_key=options.route_key,
        best_priorities={tenant_of(key): rights.priority for key, rights in api_keys.items()},
        adapter_tenants=frozenset(tenant_of(key) for key, rights in api_keys.items() if rights.adapters),
        takes_adapters=info.num_adapter_pages > 0,
        embedding=embedding_settings(info, options, model),
        changes_adapters=options.lora_allow_runtime,
        vertex_predict_route=vertex_route(os.environ, "AIP_PREDICT_ROUTE"),
        vertex_health_route=vertex_route(os.environ, "AIP_HEALTH_ROUTE"),
        compute_type=os.environ.get("COMPUTE_TYPE") or info.device_type,
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def main(args: list[str] | None = None) -> Any:
    cmd = command(RouterOptions, run, "text-generation-router", "Schedules requests and serves them over HTTP.")
    sys.exit(run_program(cmd, args))


if __name__ == "__main__":
    main()
