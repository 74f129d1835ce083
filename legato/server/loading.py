"""From options to a model on its device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from legato.common.errors import ModelError, ModelFileError, OptionError
from legato.common.options import ServerOptions
from legato.common.progress import LOADING_WEIGHTS
from legato.cpu.library import library
from legato.cpu.threads import usable_cores
from legato.kernels.compilation.ahead import can_compile_ahead
from legato.kernels.compilation.start import CompilerStart
from legato.kernels.language import enable_triton
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.locate import locate_checkpoint
from legato.modelfiles.speculator import SpeculatorFiles
from legato.models.config import ModelConfig
from legato.models.host import IN_TORCH, on_host
from legato.models.registry import CausalModel, get_model, model_config
from legato.models.speculators import Speculator, load_speculator
from legato.models.targets import AdapterTarget
from legato.server.nodes.joining import ShardLinks
from legato.server.nodes.stage import PipelineStage
from legato.server.rendezvous import join, share_cores
from legato.server.speculation.guessers import EagleGuesser, Guesser
from legato.server.speculation.loading import load_draft, why_no_drafts

logger = logging.getLogger(__name__)

# Percent between two progress lines: for people, and for programs that may draw a bar.
STEP, FINE_STEP = 20, 2
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: CausalModel
    files: ModelFiles
    device: torch.device
    dtype: torch.dtype
    shard: Shard = field(default_factory=Shard)
    speculator: Speculator | None = None
    draft: Guesser | None = None
    targets: list[AdapterTarget] = field(default_factory=list)  # the layers that LoRA adapters may change
    stage: PipelineStage | None = None  # None: the model is not divided into stages


def load(
    files: ModelFiles,
    options: ServerOptions,
    advance: Callable[[], None] = lambda: None,
    links: ShardLinks | None = None,
) -> LoadedModel:
    """Cheap checks first: a wrong configuration or flag ends in milliseconds, not after the weights are read. `advance`
    is called for every tensor."""
    num_local = options.world_size // options.nnodes
    with _naming(files):
        config = _config(files, options)
        enable_triton(not options.disable_custom_kernels)
        device = choose_device(options.device, options.rank % num_local, num_local)
        dtype = choose_dtype(options.dtype, files.config(), device)
        advance()
        shard = join(options, device, links)
        advance()
        started = time.perf_counter()
        step = FINE_STEP if options.json_output else STEP
        progress = LoadProgress(step, advance) if options.load_format == "auto" else None
        dummy = options.load_format == "dummy"
        packs = device.type == "cpu" and options.dtype is None
        if packs:
            start_kernels(num_local)
        trusted = options.trust_remote_code
        targets: list[AdapterTarget] = []
        model = get_model(
            files, config, dtype, device, shard=shard, dummy=dummy, progress=progress, trust_remote_code=trusted,
            quantize=options.quantize, packs=packs, targets=targets,
            fp8_copy_fraction=options.fp8_copy_fraction,
        )  # fmt: skip
        speculator = _speculator(options, model, dtype, device)
        draft = load_draft(options, files, model, speculator is not None, dtype, device)
        if packs:
            model = _on_host(model, shard, draft)
    seconds = round(time.perf_counter() - started, 2)
    logger.info(
        "Weights loaded", extra={"fields": {"seconds": seconds, "dtype": str(dtype)[6:], "device": str(device)}}
    )
    stage = None if links is None else links.pipeline(shard, config.hidden_size, dtype, device)
    if stage is not None and packs and shard.world_size == 1:
        stage.calibrate(model)
    return LoadedModel(model, files, device, dtype, shard, speculator, draft, targets, stage)


def _on_host(model: CausalModel, shard: Shard, draft: Guesser | None) -> CausalModel:
    """The model with its layers in the library, unless somebody looks between them."""
    if shard.world_size == 1 and not isinstance(draft, EagleGuesser):
        return on_host(model)
    if library() is not None:
        reason = "there are several shards" if shard.world_size > 1 else "EAGLE reads the states of single layers"
        logger.info("%s: %s", IN_TORCH, reason)
    return model


def _speculator(
    options: ServerOptions, model: CausalModel, dtype: torch.dtype, device: torch.device
) -> Speculator | None:
    """That of `--model-id`, if it is the checkpoint of one."""
    files = None if options.model_id is None else SpeculatorFiles.find(locate_checkpoint(options))
    problem = why_no_drafts(model, options)
    if problem is not None and (options.speculate or options.speculate_model):
        raise OptionError(problem)
    if files is None or options.pipeline_parallel_size > 1:  # stages have the states of their own layers only
        return None
    if problem is not None:
        raise OptionError(problem)
    if (options.speculate or 0) > files.num_tokens:
        raise OptionError(
            f"--speculate {options.speculate}: the speculator {files.path} proposes at most {files.num_tokens} tokens"
        )
    return load_speculator(files, model, dtype, device)


def begin_compiler(options: ServerOptions) -> CompilerStart | None:
    """Of a shard that may launch our kernels on a GPU. Has to be called before there are threads."""
    uses_kernels = options.device != "cpu" and not options.disable_custom_kernels and torch.cuda.is_available()
    return CompilerStart() if uses_kernels and can_compile_ahead() else None


def start_kernels(world_size: int) -> None:
    """Start the threads of the CPU kernels, or say that there are none."""
    kernels = library()
    if kernels is None:
        logger.warning(
            "The CPU kernels are not built, torch's int8 products are used instead: they are slower. "
            "Install a C compiler and run `python -m legato.cpu.build`"
        )
        return
    wanted = max(1, min(torch.get_num_threads(), usable_cores() // world_size))
    fields = {"instructions": kernels.instruction_set, "threads": kernels.start_threads(wanted)}
    logger.info("CPU kernels", extra={"fields": fields})


@contextmanager
def _naming(files: ModelFiles) -> Iterator[None]:
    """Prefix errors about the model with its path."""
    try:
        yield
    except ModelError as error:
        if str(files.path) in str(error):
            raise
        raise type(error)(f"{files.path}: {error}") from None


def _config(files: ModelFiles, options: ServerOptions) -> ModelConfig:
    """The normalised configuration, of an architecture that we have."""
    try:
        config = model_config(files, trust_remote_code=options.trust_remote_code)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError(f"config.json is invalid: {error}") from None
    return config if options.rope is None else config.with_rope_option(*options.rope)


def choose_device(name: str, rank: int = 0, world_size: int = 1) -> torch.device:
    """Each shard has a GPU of its own, numbered as CUDA_VISIBLE_DEVICES shows them; on a CPU a share of the cores."""
    if name == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: torch finds no usable CUDA device")
    if name == "cpu" or not torch.cuda.is_available():
        share_cores(world_size)
        return torch.device("cpu")
    if world_size == 1:
        return torch.device("cuda")
    found = torch.cuda.device_count()
    if found < world_size:
        raise OptionError(f"--num-shard {world_size} needs {world_size} GPUs, but torch finds {found}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def choose_dtype(name: str | None, config: dict[str, object], device: torch.device) -> torch.dtype:
    """On a CPU float32: the 16-bit formats are emulated on most of them and many times slower."""
    if name is not None:
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = str(config.get("torch_dtype") or config.get("dtype") or "float16")
    return DTYPES[own] if own in ("float16", "bfloat16") else torch.float16


class LoadProgress:
    """Logs a line for every `step` percent of the weights, and calls `advance` for every tensor."""

    def __init__(self, step: int, advance: Callable[[], None] = lambda: None) -> None:
        self._step = step
        self._advance = advance
        self._next = step

    def __call__(self, done: int, total: int) -> None:
        self._advance()
        percent = min(100, done * 100 // total) if total else 0
        if percent >= self._next:
            self._next = (percent // self._step + 1) * self._step
            logger.info(LOADING_WEIGHTS, extra={"fields": {"percent": percent}})
