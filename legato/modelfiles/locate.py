"""From a program's options to the local files of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from legato.common.errors import ModelNotFound
from legato.common.options import ModelOptions
from legato.common.progress import progress
from legato.modelfiles import hub
from legato.modelfiles.adapters import AdapterSource
from legato.modelfiles.files import TOKENIZER_CONFIG, ModelFiles, read_json
from legato.modelfiles.speculator import SpeculatorFiles
from legato.modelfiles.vocabularies import remote


def locate(options: ModelOptions) -> Path:
    """Downloads missing files and shows the progress. A speculator stands for its base model. With --trust-remote-code
    a tokenizer that is Python code is converted for all processes that read it."""
    path = _base(options)
    is_trusted = options.trust_remote_code and path.is_dir()
    if is_trusted and remote.has_own_code(path, read_json(path / TOKENIZER_CONFIG, optional=True)):
        remote.convert(path)
    return path


def _base(options: ModelOptions) -> Path:
    path = locate_checkpoint(options)
    speculator = SpeculatorFiles.find(path)
    if speculator is None:
        return path
    cache = Path(options.huggingface_hub_cache) if options.huggingface_hub_cache else None
    with DownloadProgress() as shown:
        return hub.resolve(speculator.base, cache_dir=cache, progress=shown, code=options.trust_remote_code)


def locate_checkpoint(options: ModelOptions) -> Path:
    """What `--model-id` names itself."""
    if options.weights_cache_override is not None:
        if not Path(options.weights_cache_override).is_dir():
            raise ModelNotFound(f"--weights-cache-override: {options.weights_cache_override} is not a folder")
        return Path(options.weights_cache_override)
    cache = cache_of(options)
    with DownloadProgress() as shown:
        if options.model_id is None:
            return hub.resolve_default(cache_dir=cache, progress=shown)
        return hub.resolve(
            options.model_id, options.revision, cache_dir=cache, progress=shown, code=options.trust_remote_code
        )


def open_model(options: ModelOptions) -> ModelFiles:
    """The files of the model that the options name, downloaded if they are not on this machine."""
    return ModelFiles.open(locate(options), cache_of(options))


def cache_of(options: ModelOptions) -> Path | None:
    return Path(options.huggingface_hub_cache) if options.huggingface_hub_cache else None


def locate_adapter(source: AdapterSource, cache: str | None) -> Path:
    """The folder of a LoRA adapter, downloaded if it is not on this machine. `cache` is --huggingface-hub-cache."""
    with DownloadProgress() as shown:
        cache_dir = Path(cache) if cache else None
        return hub.resolve_adapter(source.source, source.revision, cache_dir=cache_dir, progress=shown)


def locate_draft(name: str, options: ModelOptions) -> Path:
    """The folder or file of a draft model, downloaded if it is not on this machine."""
    with DownloadProgress() as shown:
        return hub.resolve(name, cache_dir=cache_of(options), progress=shown, code=options.trust_remote_code)


class DownloadProgress(ExitStack):
    """Shows the progress of one download after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._file: str | None = None
        self._done = 0
        self._advance: Callable[[int], None] | None = None

    def __call__(self, description: str, done: int, total: int | None) -> None:
        if description != self._file:
            self.close()
            self._file, self._done = description, 0
            self._advance = self.enter_context(progress(description, total or 0))
        assert self._advance is not None
        self._advance(done - self._done)
        self._done = done
