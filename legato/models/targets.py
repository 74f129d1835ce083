"""Which layers LoRA adapters may change, and where the matrices of adapters for them are in a page.

`Weights` notes every layer that it makes, with the names and the cut of its matrices; adapters are cut the same way.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from legato.kernels.lora.pages import LoraPlace
from legato.layers.lora import DeviceAdapters, LoraDelta
from legato.quantization.experts import ExpertWeights
from legato.quantization.stored import Ranges

# Numbers by which places in a page are aligned, for wide loads.
ALIGNMENT = 64
# Parts of a model that do not compute tokens: adapters cannot change them.
NOT_TOKENS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.")
EXPERTS = "experts"

_IN_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+\..+)$")
# Names of the same thing in older files.
_OLDER = {"embed_out": "lm_head"}


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A matrix [out_features, in] of the checkpoint, and the rows of it that are wanted; None for all."""

    name: str
    out_features: int
    rows: Ranges | None = None
    is_attention: bool = False  # queries, keys, values or the output of attention

    @property
    def num_rows(self) -> int:
        return self.out_features if self.rows is None else sum(last - first for first, last in self.rows)


class TargetCut(TypedDict, total=False):
    """Fields of `AdapterTarget`."""

    columns: tuple[int, int] | None
    order: torch.Tensor | None
    is_embedding: bool


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTarget:
    """A layer with a `lora` attribute, and the matrices whose products stand side by side in its result."""

    layer: Any
    parts: tuple[MatrixPart, ...]
    in_features: int
    columns: tuple[int, int] | None = None  # of the inputs that this shard has; None: all
    order: torch.Tensor | None = None  # of the outputs, within each part
    is_embedding: bool = False  # inputs are token ids
    num_experts: int = 0  # of a layer's experts; the names of parts then have a place for the number
    is_down: bool = False  # the second product of experts

    @property
    def num_columns(self) -> int:
        return self.in_features if self.columns is None else self.columns[1] - self.columns[0]

    @property
    def modules(self) -> set[str]:
        """The last words of its names, as --lora-target-modules has them."""
        return {EXPERTS} if self.num_experts else {canonical(part.name).rpartition(".")[2] for part in self.parts}


def expert_targets(
    name: str,
    parts: tuple[str, str, str],
    made: tuple[ExpertWeights, ExpertWeights],
    span: tuple[int, int],
    inner: int,
    hidden: int,
) -> list[AdapterTarget]:
    """Of the block of experts `name`, with their matrices for gate, up and down by the names `parts`."""
    gate, up, down = (f"{name}.{{}}.{part}" for part in parts)
    gate_up, count = (MatrixPart(gate, inner, [span]), MatrixPart(up, inner, [span])), made[0].num_experts
    return [
        AdapterTarget(made[0], gate_up, hidden, num_experts=count),
        AdapterTarget(made[1], (MatrixPart(down, hidden),), inner, columns=span, num_experts=count, is_down=True),
    ]


def canonical(name: str) -> str:
    """A name without what differs between files of the same model: the layer's number and what follows it, or the last
    word of what is in no layer."""
    found = _IN_LAYER.search(name)
    if found is None:
        last = name.rpartition(".")[2]
        return _OLDER.get(last, last)
    return found[1].replace("block_sparse_moe.", "mlp.")


class LoraLayout:
    """What a page holds: a place for each of some targets."""

    def __init__(self, targets: Iterable[AdapterTarget], modules: Collection[str] | None = None) -> None:
        """Only targets with one of these `modules`; None: all."""
        usable = [target for target in targets if not any(word in target.parts[0].name for word in NOT_TOKENS)]
        self.known = {canonical(part.name): target for target in usable for part in target.parts}
        self.modules = {module for target in usable for module in target.modules}
        self.places: list[tuple[AdapterTarget, LoraPlace]] = []
        self.page_size = 0
        for target in usable:
            if modules is None or not target.modules.isdisjoint(modules):
                self._add(target)
        self.by_name = {
            canonical(part.name): (index, number)
            for index, (target, _) in enumerate(self.places)
            for number, part in enumerate(target.parts)
        }

    def _add(self, target: AdapterTarget) -> None:
        sizes = tuple(part.num_rows for part in target.parts)
        columns, experts = target.num_columns, max(1, target.num_experts)
        first = LoraPlace(len(self.places), self.page_size, 0, columns, sizes, experts)
        b_begin = _aligned(first.a_begin + first.a_size)
        place = LoraPlace(first.index, first.a_begin, b_begin, columns, sizes, experts)
        self.places.append((target, place))
        self.page_size = _aligned(place.b_begin + place.b_size)

    def attach(self, device: DeviceAdapters) -> None:
        """From now on these layers add what adapters say."""
        for target, place in self.places:
            target.layer.lora = LoraDelta(device, place)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def usual_modules(targets: Sequence[AdapterTarget]) -> set[str]:
    """Those that adapters usually have: every linear layer, but not the experts, whose matrices would make the pages
    of all adapters many times as large, and nothing of the vocabulary."""
    linear = [target for target in targets if not target.num_experts and not target.is_embedding]
    return {module for target in linear for module in target.modules} - {"lm_head"}
