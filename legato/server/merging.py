"""`download-weights --merge-lora`: the base model with an adapter merged into it, as a model of its own."""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from legato.common.errors import ModelFileError
from legato.modelfiles.files import INDEX
from legato.modelfiles.merged import MergedModel
from legato.models.merge import MergedSource
from legato.models.registry import open_source

logger = logging.getLogger(__name__)

COPIED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
METADATA = {"format": "pt"}


def target_of(model_id: str, files: MergedModel) -> Path:
    """A folder gets the merged model itself, as TGI's `download-weights` does it; so does a Hub id, below here."""
    return files.path if Path(model_id).is_dir() else Path(model_id)


def merge(files: MergedModel, target: Path) -> Path:
    """Write the merged model, its config.json last: until then the folder is not that of a model."""
    source = MergedSource(open_source(files.base), files.path)
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in sorted(source.names()):
        by_file[source.file(name).name].append(name)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file_name, names in by_file.items():
            logger.info("Merging %s", file_name)
            tensors = {name: source.read(name, ()).contiguous() for name in names}
            _write(target / file_name, tensors)
        _copy_texts(files, target)
    except OSError as error:
        raise ModelFileError(f"{target}: the merged model cannot be written: {error.strerror or error}") from None
    logger.info("Adapter merged", extra={"fields": {"base": str(files.base.path), "path": str(target)}})
    return target


def _write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    part = file.with_suffix(".part")
    try:
        save_file(tensors, str(part), METADATA)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _copy_texts(files: MergedModel, target: Path) -> None:
    base = files.base.path
    found = {file.name: file for pattern in COPIED for file in base.glob(pattern)}
    own = {file.name: file for pattern in COPIED for file in files.path.glob(pattern)}
    found |= {name: file for name, file in own.items() if not name.startswith("adapter_") and name != "config.json"}
    if not (base / INDEX).exists():
        found.pop(INDEX, None)
    config = found.pop("config.json")
    for name, file in found.items():
        if file.resolve() != (target / name).resolve():
            shutil.copyfile(file, target / name)
    shutil.copyfile(config, target / "config.json")
