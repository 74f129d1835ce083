"""LoRA adapters as PEFT writes them, and how `--lora-adapters` names them. What Legato cannot apply exactly is refused
here, by name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legato.common.errors import ModelFileError, OptionError, UnsupportedModel
from legato.modelfiles.files import _check_safetensors, read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MAX_RANK = 256

# Keys of adapter_config.json that change what is computed, and what is said of them if they are set.
_REFUSED = {
    "use_dora": "DoRA, whose magnitudes rescale the base model's weights",
    "modules_to_save": "whole matrices in place of the base model's",
    "trainable_token_indices": "embeddings in place of the base model's",
    "layer_replication": "layers of the base model that occur several times",
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt",
    "arrow_config": "a choice between several adapters",
    "use_qalora": "inputs in groups",
    "use_bdlora": "matrices in blocks",
    "monteclora_config": "random matrices",
    "velora_config": "compressed activations",
    "kasa_config": "singular values",
    "lora_bias": "biases",
}


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """One entry of `--lora-adapters`: what requests call it, and where it is."""

    name: str
    source: str  # a folder or the id of a Hub repository
    revision: str | None = None


def parse_adapters(text: str | None) -> list[AdapterSource]:
    """TGI's syntax, comma-separated: `id`, `id@revision`, `name=path`, `name=path@revision`."""
    found: dict[str, AdapterSource] = {}
    for entry in (text or "").split(","):
        if not (entry := entry.strip()):
            continue
        name, has_name, source = entry.rpartition("=")
        source, *revisions = source.split("@")
        if not source or (has_name and not name) or len(revisions) > 1 or revisions == [""]:
            raise OptionError(f"--lora-adapters: {entry!r} is not `id`, `id@revision`, `name=path` or a list of such")
        adapter = AdapterSource(name or source, source, revisions[0] if revisions else None)
        if adapter.name in found:
            raise OptionError(f"--lora-adapters: {adapter.name!r} is named twice")
        found[adapter.name] = adapter
    return list(found.values())


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """adapter_config.json, checked."""

    base_model: str | None
    rank: int
    alpha: float
    ranks: dict[str, int]  # patterns of module names, each with its own rank
    alphas: dict[str, float]
    is_rank_stabilized: bool
    is_transposed: bool = False  # the base model's matrices are [in, out]

    def rank_of(self, module: str) -> int:
        return self.ranks.get(_matching(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), self.alphas.get(_matching(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _matching(patterns: dict[str, Any], module: str) -> str:
    """The pattern that a name ends with, as PEFT finds it."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), "")


def read_config(folder: Path) -> PeftConfig:
    file = folder / CONFIG
    if not file.is_file():
        raise ModelFileError(f"{file} is missing: {folder} is not the folder of an adapter")
    config = read_json(file)
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedModel(f"{file}: peft_type is {kind!r}; supported: 'LORA'")
    for key, meaning in _REFUSED.items():
        if config.get(key):
            raise UnsupportedModel(f"{file}: '{key}' ({meaning}) is not supported")
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedModel(f"{file}: 'bias' is {bias!r}; adapters with biases are not supported")
    base = config.get("base_model_name_or_path")
    return PeftConfig(
        base_model=base if isinstance(base, str) and base else None,
        rank=_rank(file, "r", config.get("r", 8)),
        alpha=_number(file, "lora_alpha", config.get("lora_alpha", 8)),
        ranks={
            key: _rank(file, f"rank_pattern, {key}", value) for key, value in _patterns(file, config, "rank_pattern")
        },
        alphas={
            key: _number(file, f"alpha_pattern, {key}", value)
            for key, value in _patterns(file, config, "alpha_pattern")
        },
        is_rank_stabilized=bool(config.get("use_rslora")),
        is_transposed=bool(config.get("fan_in_fan_out")),
    )


def _patterns(file: Path, config: dict[str, Any], key: str) -> list[tuple[str, object]]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelFileError(f"{file}: '{key}' is not an object")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelFileError(f"{file}: '{key}' has the pattern {pattern!r}, which is invalid: {error}") from None
    return list(patterns.items())


def _rank(file: Path, key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_RANK:
        raise ModelFileError(f"{file}: '{key}' is {value!r}, not a rank from 1 to {MAX_RANK}")
    return value


def _number(file: Path, key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelFileError(f"{file}: '{key}' is {value!r}, not a number")
    return float(value)


def weights_file(folder: Path) -> Path:
    file = folder / WEIGHTS
    if not file.is_file():
        remedy = f"convert it with `text-generation-server download-weights {folder}`"
        reason = f"; {PICKLE} is a pickle, which Legato does not load: {remedy}"
        raise ModelFileError(f"{file} is missing{reason if (folder / PICKLE).is_file() else ''}")
    _check_safetensors(file)
    return file
