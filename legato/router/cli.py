"""`text-generation-router`: waits for the shards, warms them up, then serves HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from legato.common.errors import OptionError
from legato.common.hub import DEFAULT_MODEL
from legato.common.locate import locate
from legato.common.logging import setup
from legato.common.model_files import ModelFiles
from legato.common.options import RouterOptions
from legato.common.program import command, run_program
from legato.pb import generate_pb2 as pb
from legato.router.app import create_app
from legato.router.auth import read_keys
from legato.router.backend import Backend
from legato.router.blocks import RESERVED_BLOCKS
from legato.router.chat_template import ChatTemplate
from legato.router.listening import bind, listen, serve_http
from legato.router.metrics import Metrics
from legato.router.scheduler import Scheduler, SchedulerLimits
from legato.router.seam import Limits
from legato.router.settings import RouterSettings
from legato.router.shards import GrpcShards, WarmupLimits

logger = logging.getLogger(__name__)

# Tokens of one step where nobody says. A step that large takes about half a second on two cores and a tenth of one
# on a large GPU: longer ones would make everybody else wait for a newcomer's prompt.
STEP_TOKENS = {"cpu": 512, "cuda": 4096}


def run(options: RouterOptions) -> None:
    setup(options.logger_level, options.json_output, "text-generation-router")
    for warning in options.warnings:
        logger.warning(warning)
    if options.max_input_tokens and options.max_total_tokens and options.max_input_tokens >= options.max_total_tokens:
        raise OptionError("--max-input-tokens must be smaller than --max-total-tokens")
    options = replace(options, port=vertex_port(os.environ) or options.port)
    listener = bind(options.hostname, options.port)  # before anything slow: a port in use ends at once
    api_keys = read_keys(options.api_key, options.api_key_file)
    import uvloop

    uvloop.run(serve(options, listener, api_keys))


async def serve(options: RouterOptions, listener: socket.socket, api_keys: tuple[str, ...]) -> None:
    files = ModelFiles.open(locate(options))
    tokenizer = await asyncio.to_thread(files.tokenizer)
    override = Path(options.tokenizer_config_path) if options.tokenizer_config_path else None
    chat_template = await asyncio.to_thread(ChatTemplate.load, files, override, options.payload_limit)
    shards = await GrpcShards.connect(options.master_shard_uds_path)
    info = await shards.info()
    scheduler, limits = await warm_up(shards, info, options)
    metrics = Metrics(limits)
    backend = Backend(scheduler, shards, limits, metrics.step)
    app = create_app(backend, tokenizer, settings_for(options, info, api_keys), metrics, chat_template)
    listen(listener)
    logger.info("Listening", extra={"fields": {"address": f"http://{options.hostname}:{options.port}"}})
    await serve_http(app, backend, listener, options.graceful_termination_timeout)
    await shards.close()


async def warm_up(shards: GrpcShards, info: pb.InfoResponse, options: RouterOptions) -> tuple[Scheduler, Limits]:
    started = time.perf_counter()
    step_tokens = options.max_batch_prefill_tokens or STEP_TOKENS.get(info.device_type, STEP_TOKENS["cpu"])
    rows = options.max_concurrent_requests
    found = await shards.warmup(
        WarmupLimits(
            options.max_input_tokens, options.max_total_tokens, step_tokens, options.max_batch_total_tokens, rows
        )
    )
    eos = frozenset(info.eos_token_ids)
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=found.num_blocks,
            block_size=info.block_size,
            max_rows=found.max_rows,
            max_step_tokens=max(step_tokens, found.max_rows),
            eos_token_ids=eos,
            prefix_caching=info.use_prefix_caching,
        )
    )
    limits = Limits(
        max_input_tokens=found.max_input_tokens,
        max_total_tokens=found.max_total_tokens,
        max_batch_total_tokens=(found.num_blocks - RESERVED_BLOCKS) * info.block_size,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        eos_token_ids=eos,
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


def vertex_port(environ: Mapping[str, str]) -> int | None:
    """Where Vertex AI will call. It sets the variable in every container, and nobody else does, so it beats --port."""
    port = environ.get("AIP_HTTP_PORT") or None
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        raise OptionError(f"AIP_HTTP_PORT is {port!r}: it must be a port between 1 and 65535")
    return None if port is None else int(port)


def vertex_route(environ: Mapping[str, str], name: str) -> str | None:
    """A path that Vertex AI will call."""
    path = environ.get(name) or None
    if path is not None and (not path.startswith("/") or "{" in path):
        raise OptionError(f"{name} is {path!r}: it must be a path that begins with /, without braces")
    return path


def settings_for(options: RouterOptions, info: pb.InfoResponse, api_keys: tuple[str, ...]) -> RouterSettings:
    return RouterSettings(
        model_id=options.model_id or DEFAULT_MODEL,
        max_concurrent_requests=options.max_concurrent_requests,
        max_best_of=options.max_best_of,
        max_stop_sequences=options.max_stop_sequences,
        max_top_n_tokens=options.max_top_n_tokens,
        max_client_batch_size=options.max_client_batch_size,
        validation_workers=options.validation_workers,
        grammar_support=not options.disable_grammar_support,
        schema_lenient=options.schema_lenient,
        payload_limit=options.payload_limit,
        tool_call_parser=options.tool_call_parser,
        cors_allow_origin=options.cors_allow_origin,
        api_keys=api_keys,
        vertex_predict_route=vertex_route(os.environ, "AIP_PREDICT_ROUTE"),
        vertex_health_route=vertex_route(os.environ, "AIP_HEALTH_ROUTE"),
        compute_type=os.environ.get("COMPUTE_TYPE", info.device_type),
    )


def main(args: list[str] | None = None) -> Any:
    cmd = command(RouterOptions, run, "text-generation-router", "Schedules requests and serves them over HTTP.")
    sys.exit(run_program(cmd, args))


if __name__ == "__main__":
    main()
