"""Layouts of a model over machines: tensor-parallel shards, pipeline stages and replicas.

What each GPU holds, and what a token costs on the links: arithmetic on what `memory.py` counts for one machine.

Bytes on links, for each token of a step:

    tensor parallelism    two all-reduces of the hidden state in each layer; each of k GPUs sends 2 · (k − 1) / k of it
    pipeline              the hidden state once from each stage to the next
    replicas              nothing
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from legato.plan.memory import SIZES, Fit, MemoryPlan


@dataclass(frozen=True, slots=True)
class Machines:
    count: int
    gpus: int  # of each
    network: float  # bytes per second from one machine to another
    fabric: float  # bytes per second of each GPU to the others of its machine


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes are those of one GPU: of the stage that holds most."""

    tensor: int
    stages: int
    replicas: int
    weights: int
    step: int
    bytes_per_token: int
    room: int
    block_size: int
    # Bytes that each GPU sends per token for all-reduces, and each stage to the next.
    reduced: int
    passed: int
    # Whether all-reduces leave the machine.
    over_network: bool
    # Seconds that links take of a decode of all rows.
    link_seconds: float

    @property
    def gpus(self) -> int:
        """Of one replica."""
        return self.tensor * self.stages

    @property
    def tokens(self) -> int:
        """Capacity of a replica's KV cache; 0 if the model does not fit."""
        left = self.room - self.weights - self.step
        return max(0, left // self.bytes_per_token // self.block_size * self.block_size)


def layouts(plan: MemoryPlan, machines: Machines) -> list[Layout]:
    """Those that make sense, fewest GPUs per replica first: replicas within a machine; stages of whole machines; and
    tensor parallelism over the network, to compare."""
    found = [
        _layout(plan, fit, stages, machines)
        for fit in plan.fits
        for stages in _stage_counts(plan, fit.num_shards, machines)
    ]
    return sorted(found, key=lambda each: (each.gpus, each.over_network, each.stages))


def best(plan: MemoryPlan, found: list[Layout]) -> Layout | None:
    """The fewest GPUs that hold a sequence of full length, else those that hold most; all-reduces stay in a machine if
    they can."""
    serving = [each for each in found if each.tokens]
    whole = [each for each in serving if each.tokens >= plan.shape.max_positions]
    if whole:
        return min(whole, key=lambda each: (each.over_network, each.gpus, each.stages))
    return max(serving, key=lambda each: (not each.over_network, each.tokens), default=None)


def _stage_counts(plan: MemoryPlan, tensor: int, machines: Machines) -> Iterator[int]:
    if tensor <= machines.count * machines.gpus:
        yield 1
    fills_machine = tensor == max((fit.num_shards for fit in plan.fits if fit.num_shards <= machines.gpus), default=0)
    if fills_machine and plan.shape.is_native:
        yield from (stages for stages in range(2, machines.count + 1) if stages <= plan.shape.num_layers)


def _layout(plan: MemoryPlan, fit: Fit, stages: int, machines: Machines) -> Layout:
    tensor, shape = fit.num_shards, plan.shape
    over_network = tensor > machines.gpus
    groups = machines.gpus // tensor  # of GPUs in a machine
    replicas = machines.count * machines.gpus // tensor if over_network else machines.count * groups // stages
    share = math.ceil(shape.num_layers / stages) / shape.num_layers
    # The last stage has the output matrix beside its layers, the first one the embeddings.
    vocabulary = min(fit.weights, shape.vocab_size * shape.hidden_size * SIZES[plan.dtype] // tensor)
    weights = fit.weights if stages == 1 else int((fit.weights - vocabulary) * share) + vocabulary
    hidden = shape.hidden_size * SIZES[plan.dtype]
    reduced = round(2 * shape.num_layers * 2 * (tensor - 1) / tensor * hidden)
    passed = hidden if stages > 1 else 0
    speed = machines.network if over_network else machines.fabric
    return Layout(
        tensor=tensor,
        stages=stages,
        replicas=replicas,
        weights=weights + fit.adapters,
        step=fit.step,
        bytes_per_token=math.ceil(fit.bytes_per_token * share),
        room=fit.room,
        block_size=fit.block_size,
        reduced=reduced,
        passed=passed,
        over_network=over_network,
        link_seconds=plan.num_rows * (reduced / speed + passed * (stages - 1) / machines.network),
    )
