"""Shards with LoRA adapters for benchmarks: files of adapters, and the router's scheduler around such a shard."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from legato.benchmark.engine.session import connect
from legato.benchmark.shard import spawned
from legato.common.gc import freeze_gc
from legato.common.options import RouterOptions
from legato.router.cli import warm_up
from legato.router.shards import GrpcShards
from legato.router.step_loop import StepLoop
from legato.scheduling.adapters import AdapterInfo
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import Output
from legato.telemetry.metrics import StepFigures


def shapes_of(config: dict[str, Any], modules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The linear layers of a Llama, or those with these last names: (outputs, inputs)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    count = range(config["num_hidden_layers"])
    chosen = {name: shape for name, shape in layer.items() if not modules or name.rpartition(".")[2] in modules}
    return {f"model.layers.{i}.{name}": shape for i in count for name, shape in chosen.items()}


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    rank: int,
    *,
    size: float = 0.01,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Random matrices of PEFT's layout, whose numbers are about `size`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs).mul_(size).to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank).mul_(size).to(dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class AdapterShard:
    """A shard and the loop around it. `on_step` is told of every step."""

    loop: StepLoop
    shards: GrpcShards
    adapters: list[AdapterInfo]
    on_step: Callable[[StepFigures], None] = lambda step: None
    request_ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


@dataclass
class Answers:
    """The tokens of some requests, by their ids."""

    tokens: dict[int, list[int]]
    num_left: int = 0
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.num_left = len(self.tokens)

    def put(self, request_id: int, output: Output) -> None:
        if output.error is not None:
            if not self.done.done():
                self.done.set_exception(RuntimeError(output.error))
            return
        self.tokens[request_id].append(output.token_id)
        if output.finish_reason is not None:
            self.num_left -= 1
            if self.num_left == 0:
                self.done.set_result(None)

    def trace(self, request_id: int, chunk: object) -> None:
        raise AssertionError("nothing is traced here")


@asynccontextmanager
async def opened(
    model: str, num_rows: int, arguments: Sequence[str], capture_seconds: float = 0.0
) -> AsyncIterator[AdapterShard]:
    """`capture_seconds` at most for the graphs that the shard captures while it is idle."""
    with spawned(model, arguments) as process:
        shards, info = await connect(process)
        options = RouterOptions(max_concurrent_requests=max(num_rows, 64), max_batch_size=num_rows)
        warmed, limits = await warm_up(shards, info, options)
        scheduler = Scheduler(replace(warmed.limits, prefix_caching=False, max_requests=None))
        adapters = [
            AdapterInfo(number, each.adapter_id, each.num_pages) for number, each in enumerate(info.adapters, 1)
        ]
        for adapter in adapters:
            scheduler.adapters.add(adapter)
        found: list[AdapterShard] = []
        loop = StepLoop(scheduler, shards, limits, lambda step: found[0].on_step(step))
        found.append(AdapterShard(loop, shards, adapters))
        steps = asyncio.ensure_future(loop.run())
        await asyncio.sleep(0.5)
        until = time.monotonic() + capture_seconds
        while time.monotonic() < until and (await shards.info()).num_uncaptured:
            await asyncio.sleep(0.2)
        freeze_gc()
        try:
            yield found[0]
        finally:
            steps.cancel()
            await asyncio.gather(steps, return_exceptions=True)
            await shards.close()
