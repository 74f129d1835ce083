"""A LoRA adapter as the model: its base model, with the adapter merged into the weights on load.

Everything but the weights is the base model's, except the tokenizer and the chat template, which adapters may bring.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from legato.common.errors import ModelError, ModelFileError, ModelNotFound, UnsupportedModel
from legato.modelfiles import hub
from legato.modelfiles.adapters import CONFIG, read_config, weights_file
from legato.modelfiles.files import ModelFiles, ModelFolder, WeightFormat


class MergedModel(ModelFiles):
    def __init__(self, path: Path, cache: Path | None = None) -> None:
        """The base model is downloaded if it is not on this machine."""
        super().__init__(path)
        self.base = ModelFiles.open(base_of(path, cache), cache)
        if isinstance(self.base, MergedModel):
            raise UnsupportedModel(f"{path / CONFIG}: the base model {self.base.path} is an adapter itself")
        if self.base.weight_format != "safetensors" or self.base.quantization() is not None:
            raise UnsupportedModel(
                f"{path}: an adapter cannot be merged into the quantized model {self.base.path};"
                f" serve that one with --lora-adapters {path}"
            )
        self.weight_format: WeightFormat = self.base.weight_format
        own = ModelFolder(path)
        self._texts = own if (path / "tokenizer.json").is_file() else self.base

    def config(self) -> dict[str, Any]:
        return self.base.config()

    def generation_config(self) -> dict[str, Any]:
        return self.base.generation_config()

    def tokenizer_config(self) -> dict[str, Any]:
        return self._texts.tokenizer_config()

    def chat_template(self) -> tuple[str, Any] | None:
        return self._texts.chat_template() or self.base.chat_template()

    def tokenizer(self) -> Tokenizer:
        return self._texts.tokenizer()

    def end_of_tokenizer(self) -> int | None:
        return self._texts.end_of_tokenizer()

    def weight_files(self) -> list[Path]:
        return self.base.weight_files()

    def check_weights(self) -> None:
        weights_file(self.path)
        self.base.check_weights()


def base_of(folder: Path, cache: Path | None = None) -> Path:
    """The base model of an adapter, as its configuration names it."""
    name = read_config(folder).base_model
    if name is None:
        raise ModelFileError(f"{folder / CONFIG}: 'base_model_name_or_path' is missing; name the base model there")
    if cache is None and folder.parent.name == "snapshots":
        cache = folder.parents[2]  # where the adapter is, in the Hub's layout
    local = folder / name
    if not os.path.isabs(name) and (local / "config.json").is_file():
        return local
    try:
        return hub.resolve(name, cache_dir=cache)
    except ModelError as error:
        raise ModelNotFound(f"{folder / CONFIG}: the base model {name!r} cannot be found: {error}") from None
