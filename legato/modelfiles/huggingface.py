"""Models from the Hugging Face Hub, through huggingface_hub.

Only parts of its API that have been the same from 0.34 to 2.x are used: `HfApi.model_info`, `snapshot_download` and the
classes in `huggingface_hub.errors`. It reads HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT and the cache's variables itself.
The import takes a quarter of a second, so it happens when the Hub is asked and not before.
"""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

from legato.common.errors import ModelError, ModelNotFound
from legato.modelfiles.cache import Progress, naming_folder
from legato.modelfiles.files import ModelFiles

WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# Comes along only for who trusts it (--trust-remote-code): nobody else has any use for it.
CODE = ["*.py"]
# The same weights once more, in the layouts of other programs.
UNWANTED = ["consolidated*", "original/*", "onnx/*", "openvino/*"]


def hub_model(
    repo_id: str,
    revision: str | None,
    cache_dir: Path | None,
    progress: Progress,
    timeout: float,
    code: bool = False,
) -> Path:
    """A snapshot of the repository, with its Python code if `code`. When the Hub does not give one within `timeout`,
    one that was downloaded before."""
    problem = _problem(repo_id, revision, timeout)
    if problem is None:
        return _download(repo_id, revision, cache_dir, progress, WANTED + CODE if code else WANTED)
    cached = cached_hub_model(repo_id, revision, cache_dir)
    if cached is None:
        raise ModelNotFound(f"{repo_id}: {problem}, and there is no copy in the cache")
    return cached


def cached_hub_model(repo_id: str, revision: str | None, cache_dir: Path | None) -> Path | None:
    """What an earlier download left, if it is complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=True,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
        )
        ModelFiles.open(Path(snapshot)).weight_files()
    except (LocalEntryNotFoundError, HFValidationError, ModelError):
        return None
    return Path(snapshot)


def _problem(repo_id: str, revision: str | None, timeout: float) -> str | None:
    """Why the Hub will not give the model, or None.

    Asked in a thread of its own, because a name server that does not answer cannot be given a timeout. The thread is
    left behind when time is up; it ends with the process.
    """
    answers: list[str | None] = []

    def ask() -> None:
        answers.append(_ask_hub(repo_id, revision, timeout))

    thread = threading.Thread(target=ask, name="ask-hub", daemon=True)
    thread.start()
    thread.join(timeout)
    return answers[0] if answers else f"the Hub did not answer within {timeout:g} s"


def _ask_hub(repo_id: str, revision: str | None, timeout: float) -> str | None:
    """The seam where tests put a fake."""
    from huggingface_hub import HfApi, errors

    try:
        HfApi().model_info(repo_id, revision=revision, timeout=timeout)
    except errors.HFValidationError:
        return "this is not the name of a model"
    except errors.OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except errors.GatedRepoError:
        return "its authors ask for an agreement first; accept it on the Hub and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        return "the Hub has no such model, or it is private and HF_TOKEN may not read it"
    except errors.RevisionNotFoundError:
        return f"the Hub has no revision '{revision}' of it"
    except errors.HfHubHTTPError as error:
        return f"the Hub answered {error.response.status_code}"
    except Exception as error:  # the HTTP library below changed between majors, and with it the classes of its errors
        return f"the Hub cannot be reached ({type(error).__name__})"
    return None


def _download(
    repo_id: str, revision: str | None, cache_dir: Path | None, progress: Progress, wanted: list[str]
) -> Path:
    from huggingface_hub import constants, snapshot_download

    with naming_folder(cache_dir or Path(constants.HF_HUB_CACHE), "HF_HUB_CACHE"):
        try:
            snapshot = snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=wanted,
                ignore_patterns=UNWANTED,
                tqdm_class=_relay_class(f"Downloading {repo_id}", progress),
            )
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's; those of the network have no number
            reason = (str(error).splitlines() or [""])[0]
            raise ModelNotFound(f"{repo_id}: the download failed ({type(error).__name__}: {reason})") from None
    return Path(snapshot)


def _relay_class(what: str, progress: Progress) -> Any:
    """A progress bar that shows nothing and passes the numbers on.

    The Hub's client makes one per kind of counting: files, bytes received, bytes written. Of those that count bytes the
    one that is ahead is believed. Older clients count files alone; with them nothing is reported. Whether the client
    itself may draw bars, which transformers also turns off, makes no difference.
    """
    from tqdm import tqdm as bar_class  # type: ignore[import-untyped]

    done: dict[int, int] = {}

    def display(bar: Any, *_: Any, **__: Any) -> bool:
        if bar.unit == "B" and bar.n:
            done[id(bar)] = int(bar.n)
            progress(what, max(done.values()), int(bar.total) if bar.total else None)
        return True

    def initialise(bar: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)  # by which the client turns off single bars
        bar_class.__init__(bar, *args, **{**kwargs, "disable": False, "file": io.StringIO()})

    return type("ProgressRelay", (bar_class,), {"__init__": initialise, "display": display})
