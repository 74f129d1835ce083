"""From options to a model that embeds, on its device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from legato.common.errors import ModelError, ModelFileError, OptionError
from legato.common.options import ServerOptions
from legato.modelfiles.files import ModelFiles
from legato.models.encoders.registry import EmbeddingModel, load_encoder
from legato.server.loading import FINE_STEP, STEP, LoadProgress, choose_device, choose_dtype

logger = logging.getLogger(__name__)

# Options of the KV cache and of sampling.
NO_EFFECT = {"kv_cache_dtype", "cuda_graphs", "block_size", "prefix_cache_mb", "watermark_gamma", "watermark_delta"}


def load(
    files: ModelFiles, options: ServerOptions, advance: Callable[[], None] = lambda: None
) -> tuple[EmbeddingModel, torch.dtype]:
    """`advance` is called for every tensor."""
    refuse_options(options)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, files.config(), device)
    progress = LoadProgress(FINE_STEP if options.json_output else STEP, advance)
    started = time.perf_counter()
    try:
        model = load_encoder(
            files,
            dtype,
            device,
            pooling=options.pooling,
            dummy=options.load_format == "dummy",
            progress=progress if options.load_format == "auto" else None,
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError(f"{files.path}: config.json is invalid: {error}") from None
    except ModelError as error:
        raise error if str(files.path) in str(error) else type(error)(f"{files.path}: {error}") from None
    seconds = round(time.perf_counter() - started, 2)
    fields = {"seconds": seconds, "dtype": str(dtype)[6:], "device": str(device), "pooling": model.pooling}
    logger.info("Weights loaded", extra={"fields": fields})
    return model, dtype


def refuse_options(options: ServerOptions) -> None:
    """What cannot be had with --task embed."""
    if options.world_size > 1:
        raise OptionError("--task embed runs on one device: use --num-shard 1, and a server for each device")
    if options.quantize is not None:
        raise OptionError(f"--quantize {options.quantize} is not supported with --task embed; --dtype is")
    if options.lora_adapters or options.lora_allow_runtime:
        raise OptionError("--lora-adapters and --lora-allow-runtime are not supported with --task embed")
    if options.speculate or options.rope is not None:
        raise OptionError("--speculate, --rope-scaling and --rope-factor are not supported with --task embed")
    for name in sorted(NO_EFFECT & options.given):
        logger.warning("--%s has no effect with --task embed", name.replace("_", "-"))
