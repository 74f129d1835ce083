"""Speculator checkpoints, which name their base model and propose draft tokens for it.

    Medusa            config.json has medusa_num_heads and no architectures; medusa_lm_head.safetensors
    MLP speculator    config.json has model_type mlp_speculator; model.safetensors
    EAGLE-3           config.json has an architecture with Eagle3 in its name; model.safetensors

As `--model-id` such a checkpoint stands for its base model: tokenizer, configuration and weights are that model's.
EAGLE-3 heads mostly do not name it, and are given as `--speculate-model`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from legato.common.errors import ModelFileError

MEDUSA_FILE = "medusa_lm_head.safetensors"


@dataclass(frozen=True, slots=True)
class SpeculatorFiles:
    path: Path
    kind: Literal["medusa", "mlp_speculator", "eagle3"]
    config: dict[str, Any]

    @classmethod
    def find(cls, path: Path) -> SpeculatorFiles | None:
        """None for any other model."""
        file = path / "config.json"
        if not file.is_file():
            return None
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return None  # whoever opens the model says what is wrong with it
        if not isinstance(config, dict):
            return None
        if "medusa_num_heads" in config and "architectures" not in config:
            return cls(path, "medusa", config)
        names = config.get("architectures")
        if isinstance(names, list) and any(isinstance(name, str) and "eagle3" in name.lower() for name in names):
            return cls(path, "eagle3", config)
        return cls(path, "mlp_speculator", config) if config.get("model_type") == "mlp_speculator" else None

    @property
    def base(self) -> str:
        """The model that it speculates for: a folder or a Hub id."""
        if self.kind == "eagle3":
            raise ModelFileError(
                f"{self.path} is an EAGLE-3 head: give its base model as --model-id, and the head as --speculate-model"
            )
        name = self.config.get("base_model_name_or_path")
        if not isinstance(name, str) or not name:
            raise ModelFileError(f"{self.path / 'config.json'}: base_model_name_or_path is missing")
        return name

    @property
    def layer_config(self) -> dict[str, Any]:
        """Of the layer of an EAGLE-3 head, which some checkpoints have in a section of its own."""
        section = self.config.get("transformer_layer_config")
        return {**section, "num_hidden_layers": 1} if isinstance(section, dict) else self.config

    def tapped_layers(self, num_layers: int) -> list[int]:
        """The layers of the base model whose inputs an EAGLE-3 head reads."""
        given = self.config.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
        fits = isinstance(given, list) and len(given) == 3 and all(isinstance(each, int) for each in given)
        if not fits or sorted(given) != given or not given[0] >= 0 or given[-1] >= num_layers:
            file = self.path / "config.json"
            raise ModelFileError(f"{file}: eagle_aux_hidden_state_layer_ids is {given!r}, of {num_layers} layers")
        return [int(each) for each in given]

    @property
    def num_tokens(self) -> int:
        return self.number("medusa_num_heads" if self.kind == "medusa" else "n_predict")

    def number(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelFileError(f"{self.path / 'config.json'}: {key} is {value!r}, not a number")
        return value

    @property
    def weight_files(self) -> list[Path]:
        if self.kind == "medusa":
            files = [self.path / MEDUSA_FILE]
            if not files[0].is_file():
                cure = "convert medusa_lm_head.pt to safetensors" if files[0].with_suffix(".pt").exists() else "add it"
                raise ModelFileError(f"{files[0]} is missing: {cure}")
            return files
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelFileError(f"{self.path} has no weights (*.safetensors)")
        return files
