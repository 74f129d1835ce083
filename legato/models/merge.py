"""A checkpoint with a LoRA adapter merged into it: what is added to a tensor is computed when it is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.models.peft import LoraPair, PeftTensors
from legato.models.sources import TensorSource
from legato.models.targets import NOT_TOKENS, canonical

_EXPERT = re.compile(r"^(?P<block>.+\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight$")
_FUSED = re.compile(r"^(?P<block>.+\.experts)\.(?P<part>gate_up_proj|down_proj)$")
# The place of an expert's matrix in a fused one, by its names.
_GATE_UP = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}

Delta = Callable[[], torch.Tensor]  # of the tensor's shape


class MergedSource:
    """`TensorSource` of the merged model."""

    def __init__(self, base: TensorSource, folder: Path) -> None:
        self._base = base
        self._tensors = PeftTensors(folder)
        self._deltas: dict[str, Delta] = {}
        self._last: tuple[str, torch.Tensor] | None = None  # slices of a tensor are read one after the other
        names = [name for name in base.names() if not any(word in name for word in NOT_TOKENS)]
        self._by_key = {canonical(name.removesuffix(".weight")): name for name in names}
        for pair in self._tensors.pairs:
            self._add(pair)

    def _add(self, pair: LoraPair) -> None:
        if pair.is_fused_experts:
            self._add_experts(pair)
            return
        name = self._by_key.get(canonical(pair.module))
        if name is None:
            tied = ": it is tied to the embedding" if canonical(pair.module) == "lm_head" else ""
            raise ModelFileError(
                f"{self._tensors.file}: it changes '{pair.module}', which the base model does not have{tied}"
            )
        self._tensors.rank(pair)
        (_, inputs), (outputs, _) = self._tensors.shapes(pair)
        shape = self._base.shape(name)
        # Embeddings, and GPT-2's matrices, are [in, out].
        is_transposed = pair.is_embedding or shape != (outputs, inputs) or self._tensors.config.is_transposed
        if shape != ((inputs, outputs) if is_transposed else (outputs, inputs)):
            raise ModelFileError(
                f"{self._tensors.file}: '{pair.module}' maps {inputs} numbers to {outputs}, and '{name}' of the base"
                f" model has shape {shape}: the adapter is for another model"
            )

        def delta() -> torch.Tensor:
            a, b = self._tensors.read(pair)
            return (b @ a).t() if is_transposed else b @ a

        self._deltas[name] = delta

    def _add_experts(self, pair: LoraPair) -> None:
        """All experts of a layer, whichever way the base model has them."""
        block = canonical(pair.module.replace(".base_layer", ""))
        (_, a), (b, _) = self._tensors.shapes(pair)
        found = False
        for name in self._base.names():
            single, fused = _EXPERT.match(name), _FUSED.match(name)
            match = single or fused
            if match is None or canonical(match["block"]) != block:
                continue
            shape = self._base.shape(name)[-2:]
            halves = 2 if single is not None and match["part"] in _GATE_UP else 1
            sizes = (halves * shape[0], shape[1])
            if sizes not in ((b, a), (a, b)):
                continue
            if a == b:
                raise UnsupportedModel(
                    f"{self._tensors.file}: the shapes of '{pair.module}' do not determine which side is the input"
                )
            found = True
            self._tensors.parameters[pair] = "down_proj" if match["part"] in ("down_proj", "w2") else "gate_up_proj"
            number = None if single is None else (int(single["number"]), _GATE_UP.get(single["part"], 0))
            count = self._num_experts(match["block"], name if fused else None)
            self._deltas[name] = self._expert_delta(pair, count, sizes == (a, b), number, shape[0])
        if not found:
            raise ModelFileError(f"{self._tensors.file}: '{pair.module}' fits no matrix of the base model's experts")

    def _expert_delta(
        self, pair: LoraPair, count: int, is_old: bool, number: tuple[int, int] | None, num_rows: int
    ) -> Delta:
        self._tensors.rank(pair, count)

        def delta() -> torch.Tensor:
            a, b = self._tensors.experts(pair, count, is_old=is_old)
            if number is None:
                return b @ a
            expert, half = number
            return b[expert, half * num_rows : (half + 1) * num_rows] @ a[expert]

        return delta

    def _num_experts(self, block: str, fused: str | None) -> int:
        if fused is not None:
            return self._base.shape(fused)[0]
        matches = (_EXPERT.match(name) for name in self._base.names())
        return len({match["number"] for match in matches if match is not None and match["block"] == block})

    # ---- TensorSource ----------------------------------------------------------------------------------------------

    def names(self) -> set[str]:
        return self._base.names()

    def nbytes(self) -> int:
        return self._base.nbytes()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._base.dtype(name)

    def file(self, name: str) -> Path:
        return self._base.file(name)

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        stored = self._base.read(name, index)
        if name not in self._deltas:
            return stored
        if self._last is None or self._last[0] != name:
            self._last = (name, self._deltas[name]())
        return (stored.float() + self._last[1][index]).to(stored.dtype)

    def forget(self, name: str) -> None:
        self._base.forget(name)
