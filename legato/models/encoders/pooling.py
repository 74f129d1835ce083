"""From the vectors of a text's tokens to that of the text: poolings, dense modules, classification heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.modelfiles.embedding import Pooling
from legato.modelfiles.files import read_json
from legato.models.encoders.batch import TextBatch
from legato.models.sources import SafetensorsSource

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "GELU": F.gelu,
    "ReLU": F.relu,
    "Sigmoid": torch.sigmoid,
}


class TextHead(Protocol):
    """Token vectors [T, hidden] -> [texts, size], in the order of the batch."""

    size: int

    def __call__(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor: ...


def pool(hidden: torch.Tensor, batch: TextBatch, pooling: Pooling) -> torch.Tensor:
    match pooling:
        case "mean":
            return batch.mean(hidden)
        case "cls":
            return hidden[batch.firsts]
        case "last":
            return hidden[batch.lasts]


class DenseModule:
    """A Dense module of sentence-transformers, which follows the pooling."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        config = read_json(folder / "config.json")
        if not (folder / "model.safetensors").is_file():
            raise UnsupportedModel(f"{folder} has no model.safetensors; other formats of Dense modules are not read")
        source = SafetensorsSource([folder / "model.safetensors"])
        kind = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
        if kind not in ACTIVATIONS:
            raise UnsupportedModel(f"{folder}/config.json: the activation {kind!r} is not supported")
        if "linear.weight" not in source.names():
            raise ModelFileError(f"{folder}/model.safetensors has no tensor 'linear.weight'")
        self._activate = ACTIVATIONS[kind]
        self._weight = source.read("linear.weight", ()).to(device, torch.float32)
        has_bias = "linear.bias" in source.names()
        self._bias = source.read("linear.bias", ()).to(device, torch.float32) if has_bias else None
        self.size, self.in_size = self._weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._activate(F.linear(x, self._weight, self._bias))


class PoolingHead:
    """An embedding: pooling, then dense modules."""

    def __init__(self, pooling: Pooling, hidden_size: int, modules: list[DenseModule]) -> None:
        self._pooling: Pooling = pooling
        self._modules = modules
        self.size = hidden_size
        for module in modules:
            if module.in_size != self.size:
                raise ModelFileError(f"a Dense module takes {module.in_size} numbers, and gets {self.size}")
            self.size = module.size

    def __call__(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        pooled = pool(hidden, batch, self._pooling).float()
        for module in self._modules:
            pooled = module(pooled)
        return pooled
