"""The tensors of a PEFT adapter: found, checked, scaled, and cut into the pages of a shard (`kernels/lora/pages.py`).

    base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]     linear layers, experts one by one
    base_model.model.<module>.lora_embedding_A [r, vocab], _B [hidden, r]        embeddings
    base_model.model.<block>.experts[.base_layer].lora_A.weight [experts r, in]  all experts of a layer at once

The last kind does not say which of the two products it is for, and PEFT has written it in two orientations: the shapes
decide.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from legato.common.errors import ModelError, ModelFileError, UnsupportedModel
from legato.kernels.lora.pages import PAGE_RANKS, LoraPlace
from legato.layers.lora import HostAdapter
from legato.modelfiles.adapters import MAX_RANK, PeftConfig, read_config, weights_file
from legato.models.sources import SafetensorsSource
from legato.models.targets import EXPERTS, AdapterTarget, LoraLayout, canonical
from legato.quantization.stored import Ranges

_PREFIX = re.compile(r"^(base_model\.model\.)?")
_PAIR = re.compile(r"^(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<which>[AB])(\.default)?(\.weight)?$")
_ONE_EXPERT = re.compile(r"^(?P<block>.+\.experts)\.(?P<number>\d+)\.(?P<part>\w+)$")
_ALL_EXPERTS = re.compile(r"^(?P<block>.+\.experts)(\.base_layer)*$")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A and B of one module, by the names of their tensors."""

    module: str
    a: str
    b: str
    is_embedding: bool = False

    @property
    def is_fused_experts(self) -> bool:
        return _ALL_EXPERTS.match(self.module) is not None


class PeftTensors:
    def __init__(self, folder: Path) -> None:
        self.config: PeftConfig = read_config(folder)
        self.file = weights_file(folder)
        self._source = SafetensorsSource([self.file])
        # Of fused experts, whose names do not say it: which matrix a pair changes.
        self.parameters: dict[LoraPair, str] = {}
        self.pairs = self._find_pairs()

    def _find_pairs(self) -> list[LoraPair]:
        found: dict[tuple[str, bool], dict[str, str]] = defaultdict(dict)
        copies = []
        for name in sorted(self._source.names()):
            short = _PREFIX.sub("", name)
            if short.endswith(".base_layer.weight"):  # PEFT saves an embedding that has an adapter along with it
                copies.append(short.removesuffix(".base_layer.weight"))
                continue
            match = _PAIR.match(short)
            if match is None:
                what = "DoRA" if "lora_magnitude" in name else "modules_to_save, or something else than LoRA"
                raise UnsupportedModel(f"{self.file}: tensor '{name}' is not part of a LoRA pair ({what})")
            found[match["module"], match["kind"] is not None][match["which"]] = name
        if not found:
            raise ModelFileError(f"{self.file} has no LoRA matrices")
        for (module, _), names in found.items():
            if len(names) < 2:
                raise ModelFileError(f"{self.file}: '{module}' has lora_{min(names)} only, without its other half")
        if stray := [module for module in copies if (module, True) not in found and (module, False) not in found]:
            raise UnsupportedModel(f"{self.file}: '{stray[0]}.base_layer.weight' replaces a matrix of the base model")
        return [LoraPair(module, names["A"], names["B"], kind) for (module, kind), names in found.items()]

    def shapes(self, pair: LoraPair) -> tuple[tuple[int, ...], tuple[int, ...]]:
        a, b = self._source.shape(pair.a), self._source.shape(pair.b)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
            raise ModelFileError(f"{self.file}: '{pair.module}' has lora_A {a} and lora_B {b}, which do not fit")
        return a, b

    def rank(self, pair: LoraPair, num_experts: int = 1) -> int:
        """As the tensors have it; the configuration must say the same, because the scale depends on it."""
        rows, expected = self.shapes(pair)[0][0], self.config.rank_of(self._config_name(pair))
        if rows != expected * num_experts or expected > MAX_RANK:
            raise ModelFileError(
                f"{self.file}: '{pair.module}' has rank {rows / num_experts:g}, adapter_config.json says {expected}"
            )
        return expected

    def _config_name(self, pair: LoraPair) -> str:
        """What the patterns of the configuration call it."""
        module, parameter = pair.module.replace(".base_layer", ""), self.parameters.get(pair)
        return module if parameter is None else f"{module}.{parameter}"

    def read(self, pair: LoraPair) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B, the scale in B. In float32."""
        a, b = (self._source.read(name, ()).float() for name in (pair.a, pair.b))
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ModelFileError(f"{self.file}: '{pair.module}' has numbers that are not finite")
        return a, b * self.config.scale_of(self._config_name(pair))

    def experts(self, pair: LoraPair, num_experts: int, *, is_old: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """A [experts, r, in] and B [experts, out, r] of all experts of a layer. `is_old`: older versions of PEFT took
        inputs for outputs."""
        first, second = self.read(pair)
        a = first.unflatten(0, (num_experts, -1))
        b = second.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
        return (b.transpose(1, 2), a.transpose(1, 2)) if is_old else (a, b)


def read_adapter(
    name: str, folder: Path, layout: LoraLayout, dtype: torch.dtype, *, max_rank: int = MAX_RANK, pin: bool = False
) -> HostAdapter:
    """The adapter in `folder`, as this shard needs it. `pin`: for fast copies to a GPU. ModelError."""
    try:
        tensors = PeftTensors(folder)
        return PageWriter(tensors, layout, dtype, max_rank, pin).write(name)
    except ModelError as error:
        if str(folder) in str(error):
            raise
        raise type(error)(f"{folder}: {error}") from None


class PageWriter:
    """Fills the pages of one adapter."""

    def __init__(self, tensors: PeftTensors, layout: LoraLayout, dtype: torch.dtype, max_rank: int, pin: bool) -> None:
        self._tensors = tensors
        self._layout = layout
        self._ranks = torch.zeros(len(layout.places), dtype=torch.int32)
        self._is_old = self._orientation()
        places = [(pair, self._place(pair)) for pair in tensors.pairs]
        rank = 0
        for pair, index in places:
            target = layout.places[index][0]
            mine = tensors.rank(pair, target.num_experts if pair.is_fused_experts else 1)
            self._ranks[index] = max(mine, int(self._ranks[index]))
            rank = max(rank, mine)
        if rank > max_rank:
            raise UnsupportedModel(f"the adapter has rank {rank}; this server takes up to {max_rank} (--lora-max-rank)")
        self._pairs = places
        num_pages = -(-rank // PAGE_RANKS)
        self._pages = torch.zeros(num_pages, layout.page_size, dtype=dtype, pin_memory=pin)

    def write(self, name: str) -> HostAdapter:
        touched = set()
        for pair, index in self._pairs:
            target, place = self._layout.places[index]
            touched.add(index)
            if pair.is_fused_experts:
                self._write_experts(pair, target, place)
            else:
                self._write_pair(pair, target, place)
        for index in touched:
            target, place = self._layout.places[index]
            if target.order is not None:
                outputs = self._outputs(place)
                outputs.copy_(outputs.index_select(-1, target.order.to(outputs.device)))
        ranks = self._ranks.pin_memory() if self._pages.is_pinned() else self._ranks
        return HostAdapter(name, self._pages, ranks)

    def _place(self, pair: LoraPair) -> int:
        """The index of the target that a pair changes."""
        layout, module = self._layout, pair.module
        key = self._key(pair)
        if key in layout.by_name and layout.known[key].is_embedding == pair.is_embedding:
            return layout.by_name[key][0]
        if key not in layout.known:
            raise ModelFileError(
                f"{self._tensors.file}: it changes '{module}', which the base model does not have, or not as a matrix"
                " that adapters can change"
            )
        missing = ", ".join(sorted(layout.known[key].modules))
        raise UnsupportedModel(
            f"{self._tensors.file}: it changes '{module}', which is not one of this server's --lora-target-modules:"
            f" start it with --lora-target-modules that include {missing}"
        )

    def _key(self, pair: LoraPair) -> str:
        if fused := _ALL_EXPERTS.match(pair.module):
            gate_up, down = self._expert_targets(fused["block"])
            is_down = self._shapes_fit(pair, down, self._is_old)
            self._tensors.parameters[pair] = "down_proj" if is_down else "gate_up_proj"
            return canonical((down if is_down else gate_up).parts[0].name)
        single = _ONE_EXPERT.match(pair.module)
        return canonical(pair.module if single is None else f"{single['block']}.{{}}.{single['part']}")

    # ---- experts ---------------------------------------------------------------------------------------------------

    def _expert_targets(self, block: str) -> tuple[AdapterTarget, AdapterTarget]:
        prefix = canonical(f"{block}.{{}}.")
        found = [target for name, target in self._layout.known.items() if name.startswith(prefix)]
        if not found:
            raise ModelFileError(f"{self._tensors.file}: it changes '{block}', which the base model does not have")
        return next(each for each in found if not each.is_down), next(each for each in found if each.is_down)

    def _shapes_fit(self, pair: LoraPair, target: AdapterTarget, is_old: bool) -> bool:
        (_, a), (b, _) = self._tensors.shapes(pair)
        sizes = (target.in_features, sum(part.out_features for part in target.parts))
        return (a, b) == (sizes[::-1] if is_old else sizes)

    def _orientation(self) -> bool:
        """Whether inputs and outputs of fused experts are exchanged. One layer whose shapes tell is enough."""
        fused = [pair for pair in self._tensors.pairs if pair.is_fused_experts]
        for pair in fused:
            match = _ALL_EXPERTS.match(pair.module)
            assert match is not None
            targets = self._expert_targets(match["block"])
            fits = [is_old for is_old in (False, True) if any(self._shapes_fit(pair, each, is_old) for each in targets)]
            if not fits:
                shapes = self._tensors.shapes(pair)
                raise ModelFileError(f"{self._tensors.file}: '{pair.module}' has lora_A {shapes[0]} and lora_B"
                                     f" {shapes[1]}, which fit no matrix of the experts")  # fmt: skip
            if len(fits) == 1:
                return fits[0]
        if fused:
            raise UnsupportedModel(
                f"{self._tensors.file}: the shapes of '{fused[0].module}' do not determine which sides are inputs;"
                " save it with one matrix for each expert"
            )
        return False

    def _write_experts(self, pair: LoraPair, target: AdapterTarget, place: LoraPlace) -> None:
        a, b = self._tensors.experts(pair, target.num_experts, is_old=self._is_old)
        rows = torch.split(b, [part.out_features for part in target.parts], dim=1)
        for number, (part, matrices) in enumerate(zip(target.parts, rows, strict=True)):
            for expert in range(target.num_experts):
                self._fill(target, place, number, expert, a[expert], cut_rows(matrices[expert], part.rows))

    # ---- one pair ----------------------------------------------------------------------------------------------------

    def _write_pair(self, pair: LoraPair, target: AdapterTarget, place: LoraPlace) -> None:
        a, b = self._tensors.read(pair)
        number = self._layout.by_name[self._key(pair)][1]
        part = target.parts[number]
        if (a.shape[1], b.shape[0]) != (target.in_features, part.out_features):
            raise ModelFileError(
                f"{self._tensors.file}: '{pair.module}' maps {a.shape[1]} numbers to {b.shape[0]}, that of the base"
                f" model {target.in_features} to {part.out_features}: the adapter is for another model"
            )
        single = _ONE_EXPERT.match(pair.module)
        expert = 0 if single is None else int(single["number"])
        if single is not None and expert >= target.num_experts:
            raise ModelFileError(f"{self._tensors.file}: '{pair.module}': there are {target.num_experts} experts")
        self._fill(target, place, number, expert, a, cut_rows(b, part.rows))

    def _fill(
        self, target: AdapterTarget, place: LoraPlace, part: int, expert: int, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        """a [r, in], b [our rows, r]."""
        if target.columns is not None:
            a = cut_rows(a.t(), [target.columns]).t()
        first = sum(place.out_sizes[:part])
        columns = slice(first, first + place.out_sizes[part])
        self._inputs(place)[:, :, part, expert] = self._paged(a)
        self._outputs(place)[:, :, expert, columns] = self._paged(b.t())

    def _paged(self, lines: torch.Tensor) -> torch.Tensor:
        """[r, n] -> [pages, PAGE_RANKS, n]"""
        missing = self._pages.shape[0] * PAGE_RANKS - lines.shape[0]
        return F.pad(lines, (0, 0, 0, missing)).unflatten(0, (-1, PAGE_RANKS))

    def _inputs(self, place: LoraPlace) -> torch.Tensor:
        area = self._pages[:, place.a_begin : place.a_begin + place.a_size]
        return area.unflatten(1, (PAGE_RANKS, place.num_parts, place.num_experts, place.in_features))

    def _outputs(self, place: LoraPlace) -> torch.Tensor:
        area = self._pages[:, place.b_begin : place.b_begin + place.b_size]
        return area.unflatten(1, (PAGE_RANKS, place.num_experts, place.out_features))


def cut_rows(matrix: torch.Tensor, ranges: Ranges | None) -> torch.Tensor:
    """These rows of a matrix; those beyond its end are zero."""
    if ranges is None:
        return matrix
    pieces = [F.pad(matrix[first:last], (0, 0, 0, last - first - len(matrix[first:last]))) for first, last in ranges]
    return torch.cat(pieces)


def adapter_modules(folder: Path) -> set[str]:
    """What an adapter changes, in the words of --lora-target-modules."""
    pairs = PeftTensors(folder).pairs
    is_expert = [_ALL_EXPERTS.match(pair.module) or _ONE_EXPERT.match(pair.module) for pair in pairs]
    return {
        EXPERTS if expert else canonical(pair.module).rpartition(".")[2]
        for pair, expert in zip(pairs, is_expert, strict=True)
    }


def adapter_rank(folder: Path) -> int:
    """The largest rank that adapter_config.json names."""
    config = read_config(folder)
    return max(config.rank, *config.ranks.values()) if config.ranks else config.rank
