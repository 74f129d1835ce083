"""Which class serves which `model_type`, and how a model is put together from its files."""

from __future__ import annotations

import importlib
from typing import Protocol

import torch

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.common.model_files import ModelFiles
from legato.layers.kv_cache import KVCache, KVShape
from legato.layers.step import Step
from legato.models.config import ModelConfig
from legato.models.dummy import DummyWeights
from legato.models.gguf_source import GgufSource
from legato.models.weights import Progress, SafetensorsSource, TensorSource, Weights

ARCHITECTURES = {
    "llama": "legato.models.llama:Llama",
}


class CausalModel(Protocol):
    """What the engine needs of an architecture."""

    config: ModelConfig
    kv_shape: KVShape

    def forward(self, step: Step, cache: KVCache) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def get_model(
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dummy: bool = False,
    progress: Progress | None = None,
) -> CausalModel:
    """Build the model that `config` describes and fill it from `files`."""
    architecture = architecture_for(config.model_type)
    if dummy:
        built: CausalModel = architecture(config, DummyWeights(dtype, device))
        return built
    weights = Weights(_source(files), dtype, device, progress)
    try:
        model: CausalModel = architecture(config, weights)
        weights.check_all_used()
    except ModelFileError as error:
        raise ModelFileError(f"{files.path}: {error}") from None
    return model


def architecture_for(model_type: str) -> type:
    if model_type not in ARCHITECTURES:
        raise UnsupportedModel(
            f"model_type '{model_type}' is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    module, _, name = ARCHITECTURES[model_type].partition(":")
    architecture: type = getattr(importlib.import_module(module), name)
    return architecture


def _source(files: ModelFiles) -> TensorSource:
    if files.weight_format == "gguf":
        return GgufSource(files.weight_files()[0])
    return SafetensorsSource(files.weight_files())
