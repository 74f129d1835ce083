"""Reads the configuration of an embedding model or classifier, in the layout of sentence-transformers.

    modules.json                         the modules behind the transformer: pooling, dense layers, normalisation
    1_Pooling/config.json                how the vectors of a text's tokens become one
    2_Dense/config.json, *.safetensors   a matrix behind that
    sentence_bert_config.json            the most tokens of a text
    config_sentence_transformers.json    prompts that are put before texts, by name
    config.json                          architecture, labels of a classifier

Brings in no torch: the router reads it, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from legato.common.errors import ModelFileError, UnsupportedModel
from legato.modelfiles.files import ModelFiles, read_json

Pooling = Literal["mean", "cls", "last"]

CLASSIFIER_SUFFIX = "ForSequenceClassification"
POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# The keys of older files, one flag for each pooling.
OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True, slots=True)
class EmbeddingFiles:
    # None: no file says it.
    pooling: Pooling | None = None
    # Folders of dense modules behind the pooling, in order.
    dense: tuple[Path, ...] = ()
    # Whether embeddings have the length one unless a request says otherwise.
    normalized: bool = True
    # The most tokens of a text, if a file says it.
    max_tokens: int | None = None
    # Texts that may be put before a text, by name, and the name of the one that is unless a request names another.
    prompts: dict[str, str] | None = None
    default_prompt: str | None = None
    # Of a classifier: the names of its outputs. None: the model embeds.
    labels: tuple[str, ...] | None = None

    @classmethod
    def read(cls, files: ModelFiles) -> EmbeddingFiles:
        folder = files.path if files.path.is_dir() else files.path.parent
        config = files.config()
        labels = _labels(config) if is_classifier(config) else None
        pooling, dense, normalized = _modules(folder)
        settings = read_json(folder / "config_sentence_transformers.json", optional=True)
        prompts = settings.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise ModelFileError(f"{folder}/config_sentence_transformers.json: `prompts` must be texts by name")
        default = settings.get("default_prompt_name")
        if default is not None and default not in prompts:
            raise ModelFileError(
                f"{folder}/config_sentence_transformers.json: there is no prompt {default!r} (default_prompt_name)"
            )
        return cls(pooling, dense, normalized, _max_tokens(folder), prompts, default, labels)


def is_classifier(config: dict[str, Any]) -> bool:
    architectures = config.get("architectures") or [""]
    return str(architectures[0]).endswith(CLASSIFIER_SUFFIX)


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label") or {}
    count = config.get("num_labels") or len(names) or 2  # the default of transformers, which does not write it
    if not isinstance(names, dict) or not isinstance(count, int):
        raise ModelFileError("config.json: `id2label` must be names by number")
    return tuple(str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(count))


def _modules(folder: Path) -> tuple[Pooling | None, tuple[Path, ...], bool]:
    """Pooling, dense modules, and whether a normalisation follows. Without the file, vectors are normalised."""
    listed = _read_list(folder / "modules.json")
    if listed is None:
        return None, (), True
    pooling: Pooling | None = None
    dense: list[Path] = []
    normalized = False
    for module in listed:
        kind, path = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if folder.resolve() not in (path.resolve(), *path.resolve().parents):
            raise ModelFileError(f"{folder}/modules.json refers to {path}, which is outside the folder")
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _pooling(path)
            case "Dense":
                dense.append(path)
            case "Normalize":
                normalized = True
            case _:
                raise UnsupportedModel(
                    f"{folder}/modules.json: the module {module.get('type')!r} is not supported;"
                    " known: Transformer, Pooling, Dense, Normalize"
                )
    return pooling, tuple(dense), normalized


def _pooling(path: Path) -> Pooling:
    config = read_json(path / "config.json")
    if config.get("include_prompt") is False:
        raise UnsupportedModel(f"{path}/config.json: pooling without the prompt (include_prompt) is not supported")
    named = config.get("pooling_mode", [name for key, name in OLD_POOLINGS.items() if config.get(key) is True])
    names = [named] if isinstance(named, str) else list(named)
    if len(names) != 1 or names[0] not in POOLINGS:
        raise UnsupportedModel(
            f"{path}/config.json: the pooling {', '.join(map(str, names)) or 'of no tokens'} is not supported;"
            f" known: {', '.join(POOLINGS)}"
        )
    return POOLINGS[names[0]]


def _max_tokens(folder: Path) -> int | None:
    """As sentence-transformers cuts texts, or as the tokenizer does. Tokenizers say 1e30 where they do not know."""
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        found = read_json(folder / name, optional=True).get(key)
        if isinstance(found, int) and 0 < found < 1 << 24:
            return found
    return None


def _read_list(file: Path) -> list[dict[str, Any]] | None:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelFileError(f"{file} must be a list of objects")
    return value
