"""`legato plan MODEL`: computes whether a model fits and on how many shards, before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.console import Console
from rich.table import Table

from legato.common.errors import ModelNotFound, OptionError
from legato.common.option import option
from legato.common.options import Checkpoints, ModelOptions, OnLoad
from legato.common.program import command
from legato.modelfiles import hub
from legato.modelfiles.cache import cache_folder
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.huggingface import cached_hub_model
from legato.modelfiles.index import PREFIX, cached_package_model
from legato.modelfiles.locate import cache_of
from legato.modelfiles.shapes import SHAPES
from legato.models import foreign
from legato.models.catalogue import CATALOGUE
from legato.plan.layouts import Machines
from legato.plan.memory import Device, Fit, MemoryPlan, choose_dtype
from legato.plan.spread import Spread
from legato.scheduling.budget import step_sizes
from legato.server.memory.capacity import HOST_SHARE

GIB = 2**30
UNITS = {"": GIB, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """What to plan for"""

    changes: ClassVar[dict[str, dict[str, Any]]] = {"model_id": {"positional": True}}

    memory: str | None = option(
        None,
        "Memory of each GPU, such as `80GiB`. Default: the memory of this machine's GPU; without a GPU, its main"
        " memory.",
        env=None,
    )
    dtype: Literal["float16", "bfloat16", "float32"] | None = option(
        None, "Data type of weights and activations. Default: the dtype that a shard would choose.", env=None
    )
    quantize: Literal[Checkpoints, OnLoad] | None = option(
        None, "Quantization method of the weights. Default: the checkpoint's method.", env=None
    )
    kv_cache_dtype: Literal["fp8_e4m3fn", "fp8_e5m2"] | None = option(
        None, "Data type of the KV cache. Default: the model's dtype.", env=None
    )
    max_concurrent_requests: int = option(128, "Maximum requests running at once.", env=None, minimum=1)
    max_batch_prefill_tokens: int | None = option(
        None, "Maximum tokens of one step. Default: the router's default.", env=None, minimum=1
    )
    lora_device_ranks: int | None = option(
        None, "Device memory for LoRA adapters, as a total rank. Default: no adapters.", env=None, minimum=8
    )
    lora_target_modules: tuple[str, ...] = option(
        (), "Layers that LoRA adapters may change. Default: all linear layers except experts and `lm_head`.", env=None
    )
    machines: int = option(1, "Number of machines to spread the model over.", env=None, minimum=1)
    gpus_per_machine: int = option(8, "Number of GPUs per machine, with `--machines`.", env=None, minimum=1)
    network_gbit: float = option(
        200.0, "Network bandwidth between machines, in Gbit/s, with `--machines`.", env=None, minimum=0.001
    )
    fabric_gbyte: float = option(
        450.0,
        "Bandwidth between the GPUs of a machine (NVLink, PCIe), in GB/s per GPU, with `--machines`.",
        env=None,
        minimum=0.001,
    )
    json: bool = option(False, "Print the plan as JSON.", env=None)


def run(options: PlanOptions) -> int:
    made = make_plan(options)
    line = command_for(made, options)
    spread = over_machines(made, options) if "machines" in options.given else None
    if options.json:
        print(json.dumps({**to_json(made, line), **(spread.to_json() if spread else {})}, indent=2))
    else:
        show(made, None if spread else line, Console())
        if spread is not None:
            spread.show(Console())
    return 0 if made.best or (spread and spread.best) else 1


def make_plan(options: PlanOptions) -> MemoryPlan:
    files = None if options.model_id in SHAPES else ModelFiles.open(find(options), cache_of(options))
    config = SHAPES[str(options.model_id)] if files is None else files.config()
    if files is not None and str(config.get("model_type")) not in CATALOGUE:
        foreign.check(files, options.trust_remote_code, foreign.Mentioned())
    device = _device(options.memory)
    dtype = choose_dtype(options.dtype, config, device)
    from legato.cpu.library import library
    from legato.plan.counting import AdapterRoom, CountedModel  # brings in torch; mistakes are found before

    ranks = options.lora_device_ranks
    adapters = None if ranks is None else AdapterRoom(ranks, options.lora_target_modules)
    packs = device.kind == "cpu" and options.dtype is None and library() is not None
    model = CountedModel(config, dtype, files, options.quantize, device.kind, adapters, packs, options.kv_cache_dtype)
    return MemoryPlan(
        model=options.model_id or hub.DEFAULT_MODEL,
        shape=model.shape,
        formats=model.formats,
        sizes=list(model.shard_sizes()),
        dtype=dtype,
        kv_dtype=options.kv_cache_dtype,
        packs=packs,
        device=device,
        num_rows=options.max_concurrent_requests,
        step_tokens=step_sizes(device.kind, options.max_batch_prefill_tokens).max_tokens,
    )


def find(options: PlanOptions) -> Path:
    """The model on this machine; nothing is downloaded."""
    if options.weights_cache_override is not None:
        return Path(options.weights_cache_override)
    cache = Path(options.huggingface_hub_cache) if options.huggingface_hub_cache else None
    name = options.model_id
    if name is None:
        found = cached_package_model(hub.DEFAULT_PACKAGE, cache_folder(cache))
        found = found or cached_hub_model(hub.DEFAULT_MODEL, None, cache)
    elif os.path.exists(path := os.path.expanduser(name)) or name.startswith(("/", ".", "~")):
        return Path(path)
    elif name.startswith(PREFIX):
        found = cached_package_model(name, cache_folder(cache))
    else:
        found = cached_hub_model(name, options.revision, cache)
    if found is None:
        raise ModelNotFound(
            f"{name or hub.DEFAULT_MODEL} is not on this machine: fetch it with"
            f" `{shlex.join(['text-generation-server', 'download-weights', *([name] if name else [])])}`,"
            f" or plan for one of the shapes {', '.join(SHAPES)}"
        )
    return found


def parse_memory(text: str) -> int:
    """`80GiB`, `80 GB`, `24576MiB`; a bare number is GiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in UNITS or float(match[1]) <= 0:
        raise OptionError(f"--memory {text}: must be a size such as 80GiB or 24GB")
    return int(float(match[1]) * UNITS[match[2]])


def _device(memory: str | None) -> Device:
    if memory is not None:
        return Device("cuda", "GPU", parse_memory(memory))
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        listing = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        name, _, mebibytes = listing.splitlines()[0].rpartition(",")
        return Device("cuda", name.strip(), int(mebibytes) * 2**20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return Device("cpu", "CPU", int(_free_host_memory() * HOST_SHARE))


def _free_host_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def command_for(plan: MemoryPlan, options: PlanOptions) -> str | None:
    """The command to run, if there is one: shapes without weights run in benchmarks only, which start one shard."""
    formats = format_words(options)
    if options.model_id not in SHAPES:
        return plan.command([*launcher_words(options), *formats])
    if plan.best is None or plan.best.num_shards > 1:
        return None
    line = plan.command(["legato", "bench", "engine", "--model", str(options.model_id)])
    return f"{line} -- {shlex.join(formats)}" if formats else line


def over_machines(plan: MemoryPlan, options: PlanOptions) -> Spread:
    network, fabric = options.network_gbit * 1e9 / 8, options.fabric_gbyte * 1e9
    machines = Machines(options.machines, options.gpus_per_machine, network, fabric)
    words = [] if options.model_id in SHAPES else [*launcher_words(options), *format_words(options)]
    return Spread(plan, machines, words)


def launcher_words(options: PlanOptions) -> list[str]:
    words = ["text-generation-launcher"] + (["--model-id", options.model_id] if options.model_id else [])
    return [*words, *(["--revision", options.revision] if options.revision else [])]


def format_words(options: PlanOptions) -> list[str]:
    formats = ["--dtype", options.dtype] if options.dtype else []
    formats += ["--quantize", options.quantize] if options.quantize else []
    formats += ["--kv-cache-dtype", options.kv_cache_dtype] if options.kv_cache_dtype else []
    formats += ["--lora-device-ranks", str(options.lora_device_ranks)] if options.lora_device_ranks else []
    modules = ",".join(options.lora_target_modules)
    formats += ["--lora-target-modules", modules] if options.lora_device_ranks and modules else []
    return formats


def show(plan: MemoryPlan, line: str | None, console: Console) -> None:
    shape = plan.shape
    kinds = ", ".join(f"{kind} {_gib(size)}" for kind, size in sorted(plan.formats.items())) or "no files"
    console.print(
        f"{plan.model}: {shape.num_layers} layers, up to {shape.max_positions:,} tokens; in files: {kinds}",
        soft_wrap=True,
    )
    console.print(
        f"In {plan.dtype}{', matrices packed' if plan.packs else ''}, KV cache in {plan.kv_dtypes},"
        f" on {plan.device.name} with {_gib(plan.device.memory)} each;"
        f" {plan.num_rows} requests, steps of {plan.step_tokens:,} tokens",
        soft_wrap=True,
    )
    has_adapters = any(fit.adapters for fit in plan.fits)
    more = ["Adapters"] if has_adapters else []
    table = Table("Shards", "Weights", *more, "Step (estimate)", "KV bytes/token", "Tokens", "Sequences of full length")
    for fit in plan.fits:
        full = f"{fit.tokens / shape.longest_in_blocks:.1f}" if fit.tokens else "does not fit"
        adapters = [_gib(fit.adapters)] if has_adapters else []
        sizes = (_gib(fit.weights), *adapters, _gib(fit.step), f"{fit.bytes_per_token:,}", f"{fit.tokens:,}")
        table.add_row(str(fit.num_shards), *sizes, full)
    console.print(table)
    if plan.best is None:
        verdict = "It does not fit: reduce --max-batch-prefill-tokens, or use larger devices or a smaller model."
    else:
        count = plan.best.num_shards
        verdict = f"It fits on {count} shard{'s' if count > 1 else ''}." + (
            f" Serve it with:\n  {line}" if line else ""
        )
    console.print(verdict, soft_wrap=True, highlight=False)


def to_json(plan: MemoryPlan, line: str | None) -> dict[str, Any]:
    best: Fit | None = plan.best
    return {
        **asdict(plan),
        "file_bytes": sum(plan.formats.values()),
        "shards": [{**asdict(fit), "tokens": fit.tokens, "fits": fit.tokens > 0} for fit in plan.fits],
        "best": None if best is None else best.num_shards,
        "command": line,
    }


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


COMMAND = command(
    PlanOptions, run, "plan", "Compute whether a model fits and on how many shards, before anything is loaded."
)
