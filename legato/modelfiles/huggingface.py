"""Models from the Hugging Face Hub, through huggingface_hub.

Uses only what is the same in versions 0.34 to 2.x: `HfApi.model_info`, `snapshot_download` and the classes in
`huggingface_hub.errors`. The library reads HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT and the cache variables itself. It is
imported on first use, because the import takes a quarter of a second.
"""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

from legato.common.errors import ModelError, ModelNotFound
from legato.modelfiles.cache import Progress, disk_errors_name
from legato.modelfiles.files import ModelFiles
from legato.modelfiles.vocabularies.find import FILES as VOCABULARY_FILES

MODEL_PATTERNS = ["*.json", "*.safetensors", "*.jinja", *VOCABULARY_FILES, "vocab.txt"]
# Downloaded only with --trust-remote-code.
CODE_PATTERNS = ["*.py"]
# The same weights in other formats.
IGNORED_PATTERNS = ["consolidated*", "original/*", "onnx/*", "openvino/*"]


def hub_model(
    repo_id: str,
    revision: str | None,
    cache_dir: Path | None,
    progress: Progress,
    timeout: float,
    code: bool = False,
) -> Path:
    """A snapshot of the repository, with its Python code if `code`. If the Hub does not respond within `timeout`, the
    cached one."""
    problem = _problem(repo_id, revision, timeout)
    if problem is None:
        patterns = MODEL_PATTERNS + CODE_PATTERNS if code else MODEL_PATTERNS
        return _download(repo_id, revision, cache_dir, progress, patterns)
    cached = cached_hub_model(repo_id, revision, cache_dir)
    if cached is None:
        raise ModelNotFound(f"{repo_id}: {problem}, and the cache has no copy")
    return cached


def cached_hub_model(repo_id: str, revision: str | None, cache_dir: Path | None) -> Path | None:
    """The cached snapshot, if it is complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=True,
            allow_patterns=MODEL_PATTERNS,
            ignore_patterns=IGNORED_PATTERNS,
        )
        ModelFiles.open(Path(snapshot)).weight_files()
    except (LocalEntryNotFoundError, HFValidationError, ModelError):
        return None
    return Path(snapshot)


def hub_adapter(repo_id: str, revision: str | None, cache_dir: Path | None, progress: Progress, timeout: float) -> Path:
    """A snapshot of a repository of PEFT's. If the Hub does not respond within `timeout`, the cached one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    problem = _problem(repo_id, revision, timeout)
    if problem is None:
        return _download(repo_id, revision, cache_dir, progress, MODEL_PATTERNS)
    try:
        snapshot = snapshot_download(repo_id, revision=revision, cache_dir=cache_dir, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        raise ModelNotFound(f"{repo_id}: {problem}, and the cache has no copy") from None
    return Path(snapshot)


def _problem(repo_id: str, revision: str | None, timeout: float) -> str | None:
    """Why the model cannot be downloaded from the Hub, or None.

    Runs in a thread, because DNS lookups have no timeout. After the timeout the thread is abandoned.
    """
    answers: list[str | None] = []

    def ask() -> None:
        answers.append(_ask_hub(repo_id, revision, timeout))

    thread = threading.Thread(target=ask, name="ask-hub", daemon=True)
    thread.start()
    thread.join(timeout)
    return answers[0] if answers else f"the Hub did not respond within {timeout:g} s"


def _ask_hub(repo_id: str, revision: str | None, timeout: float) -> str | None:
    """Replaced by a fake in tests."""
    from huggingface_hub import HfApi, errors

    try:
        HfApi().model_info(repo_id, revision=revision, timeout=timeout)
    except errors.HFValidationError:
        return "this is not a valid repository id"
    except errors.OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except errors.GatedRepoError:
        return "the repository is gated; accept its terms on the Hub and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        return "the Hub has no such repository, or it is private and HF_TOKEN does not give access"
    except errors.RevisionNotFoundError:
        return f"the repository has no revision '{revision}'"
    except errors.HfHubHTTPError as error:
        return f"the Hub responded with status {error.response.status_code}"
    except Exception as error:  # the HTTP library and its exceptions differ between versions
        return f"the Hub cannot be reached ({type(error).__name__})"
    return None


def _download(
    repo_id: str, revision: str | None, cache_dir: Path | None, progress: Progress, patterns: list[str]
) -> Path:
    from huggingface_hub import constants, snapshot_download

    with disk_errors_name(cache_dir or Path(constants.HF_HUB_CACHE), "HF_HUB_CACHE"):
        try:
            snapshot = snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=patterns,
                ignore_patterns=IGNORED_PATTERNS,
                tqdm_class=_relay_class(f"Downloading {repo_id}", progress),
            )
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # a disk error; network errors have no errno
            reason = (str(error).splitlines() or [""])[0]
            raise ModelNotFound(f"{repo_id}: the download failed ({type(error).__name__}: {reason})") from None
    return Path(snapshot)


def _relay_class(what: str, progress: Progress) -> Any:
    """A tqdm class that draws nothing and reports progress to `progress`.

    The library creates one bar each for files, bytes received and bytes written; the most advanced of those in bytes
    counts. Older versions count files only, and nothing is reported. Works even if progress bars are disabled.
    """
    from tqdm import tqdm as bar_class  # type: ignore[import-untyped]

    done: dict[int, int] = {}

    def display(bar: Any, *_: Any, **__: Any) -> bool:
        if bar.unit == "B" and bar.n:
            done[id(bar)] = int(bar.n)
            progress(what, max(done.values()), int(bar.total) if bar.total else None)
        return True

    def initialise(bar: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)  # used by the library to disable single bars
        bar_class.__init__(bar, *args, **{**kwargs, "disable": False, "file": io.StringIO()})

    return type("ProgressRelay", (bar_class,), {"__init__": initialise, "display": display})
