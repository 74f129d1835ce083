"""Medusa and MLP heads: they propose further tokens from the hidden state of the last sampled token.

Medusa has a head for each token, independent of the others. An MLP speculator is a small recurrent network: it goes on
from the state and the token that was sampled, one token at a time. Both see the state as the model's own head does,
behind the last norm, and take the likeliest token: a guess that is wrong costs time and changes no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.modelfiles.speculator import SpeculatorFiles
from legato.models.decoder import Decoder
from legato.models.registry import CausalModel
from legato.models.sources import SafetensorsSource

# Of the norms of MLP speculators.
EPS = 1e-6


class Speculator(Protocol):
    """Called by the engine after a step has sampled. Must not wait for the device."""

    num_tokens: int

    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        """[n, count] tokens that may follow `token_ids` [n], which were sampled from `hidden` [n, hidden_size], states
        as `CausalModel.forward` returns them."""
        ...


class CheckpointTensors:
    """Tensors by name and shape. All of them must be read: an unread tensor means that the layout is unknown."""

    def __init__(self, files: SpeculatorFiles, dtype: torch.dtype, device: torch.device) -> None:
        self._files = files
        self._source = SafetensorsSource(files.weight_files)
        self._dtype, self._device = dtype, device
        self._unused = self._source.names()

    def __contains__(self, name: str) -> bool:
        return name in self._source.names()

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._source.names():
            raise ModelFileError(f"{self._files.path}: tensor {name} is missing")
        if self._source.shape(name) != shape:
            raise ModelFileError(f"{self._files.path}: {name} is {list(self._source.shape(name))}, not {list(shape)}")
        self._unused.discard(name)
        return self._source.read(name, ()).to(self._device, self._dtype, copy=True)

    def integers(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self or self._source.shape(name) != shape:
            raise ModelFileError(f"{self._files.path}: {name} is missing, or not {list(shape)}")
        self._unused.discard(name)
        return self._source.read(name, ()).to(self._device, torch.int64)

    def skip(self, name: str) -> None:
        self._unused.discard(name)

    def check_all_used(self) -> None:
        if self._unused:
            raise ModelFileError(
                f"{self._files.path}: tensors that no head uses: {', '.join(sorted(self._unused)[:5])}"
            )


class Medusa:
    """Each head is some residual layers and a matrix to logits (V1), or the base model's own (V2)."""

    def __init__(self, files: SpeculatorFiles, base: Decoder, tensors: CheckpointTensors) -> None:
        self.num_tokens = files.num_tokens
        self._base = base
        size, vocab_size = base.config.hidden_size, base.config.vocab_size
        num_layers = files.number("medusa_num_layers", 1)
        self._layers = [
            [
                (tensors(f"{head}.{layer}.linear.weight", size, size), tensors(f"{head}.{layer}.linear.bias", size))
                for layer in range(num_layers)
            ]
            for head in range(self.num_tokens)
        ]
        self._heads: list[Callable[[torch.Tensor], torch.Tensor]] = [base.head] * self.num_tokens
        if f"0.{num_layers}.weight" in tensors:
            self._heads = [
                _product(tensors(f"{head}.{num_layers}.weight", vocab_size, size)) for head in range(self.num_tokens)
            ]

    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        state = self._base.norm(hidden)
        found = []
        for layers, head in zip(self._layers[:count], self._heads, strict=False):
            x = state
            for weight, bias in layers:
                x = x + F.silu(F.linear(x, weight, bias))
            found.append(head(x).argmax(-1))
        return torch.stack(found, 1)


class MLPSpeculator:
    """state = gelu(norm(projected state + embedded token)), logits = head(state): for each token, or (tied) for all
    tokens but the first the same matrices."""

    def __init__(self, files: SpeculatorFiles, base: Decoder, tensors: CheckpointTensors) -> None:
        self.num_tokens = count = files.num_tokens
        self._base = base
        self._scales_input = bool(files.config.get("scale_input", False))
        size, vocab_size = base.config.hidden_size, files.number("vocab_size", base.config.vocab_size)
        if files.number("emb_dim", size) != size or vocab_size != base.config.vocab_size:
            raise ModelFileError(f"{files.path / 'config.json'}: emb_dim and vocab_size are not those of {files.base}")
        inner = files.number("inner_dim", 0) or size
        is_tied = bool(files.config.get("tie_weights", False))

        def each(name: str, part: str, *shape: int, first: tuple[int, ...] | None = None) -> list[torch.Tensor]:
            """One for each token; of a tied speculator one for all, besides the first of another shape."""
            shapes = [shape if first is None or i else first for i in range(count)]
            if not is_tied:
                return [tensors(f"speculator.{name}.{i}.{part}", *shapes[i]) for i in range(count)]
            num_stored = 1 if first is None else min(2, count)
            stored = [tensors(f"speculator.{name}.{i}.{part}", *shapes[i]) for i in range(num_stored)]
            return [stored[min(i, num_stored - 1)] for i in range(count)]

        self._embeddings = each("emb", "weight", vocab_size, inner)
        self._projections = each("proj", "weight", inner, inner, first=(inner, size))
        self._norms = list(zip(each("ln", "weight", inner), each("ln", "bias", inner), strict=True))
        self._heads = each("head", "weight", vocab_size, inner)
        state_weight = 0.5 ** (0.5 / count)
        # How much a token counts beside the state, so that the state's share halves over all tokens.
        self._token_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        state = self._base.norm(hidden)
        if self._scales_input:
            state = _rms(state) / math.sqrt(2)
        found = []
        for i in range(count):
            state = F.linear(state, self._projections[i]) + self._token_weight * self._embeddings[i][token_ids]
            weight, bias = self._norms[i]
            state = F.gelu(_rms(state) * weight + bias)
            token_ids = F.linear(state, self._heads[i]).argmax(-1)
            found.append(token_ids)
        return torch.stack(found, 1)


def _product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.linear(x, weight)


def _rms(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def load_speculator(files: SpeculatorFiles, base: CausalModel, dtype: torch.dtype, device: torch.device) -> Speculator:
    """Every shard has all of it: it is small, and all shards see the same states."""
    if not isinstance(base, Decoder):
        raise UnsupportedModel(f"{files.path}: speculators for model_type '{base.config.model_type}' are not supported")
    if not 0 < files.num_tokens <= 16:
        raise ModelFileError(f"{files.path / 'config.json'}: {files.num_tokens} heads, expected 1 to 16")
    tensors = CheckpointTensors(files, dtype, device)
    kind = Medusa if files.kind == "medusa" else MLPSpeculator
    speculator: Speculator = kind(files, base, tensors)
    tensors.check_all_used()
    return speculator
