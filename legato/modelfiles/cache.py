"""The cache of models from the package index.

    <cache>/pypi/<package>/.lock
                           <version>/legato.json      the manifest: sources, sizes and sha256
                                     <package's files>
                           .partial-*/                incomplete, written by the holder of the lock

A version's folder is created by one rename, so it is always complete. Readers take no lock and write nothing, so a
filled cache works on a read-only disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from legato.common.errors import ModelError

# description, bytes done, bytes in all (None: unknown)
Progress = Callable[[str, int, int | None], None]

MANIFEST = "legato.json"
PARTIAL = ".partial-"

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EROFS: "it is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}


@dataclass(frozen=True, slots=True)
class StoredFile:
    size: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> StoredFile:
        with file.open("rb") as stream:
            return cls(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    package: str
    version: str
    # The argument of `ModelFiles.open`, relative to the version's folder.
    model: str
    wheels: dict[str, str]
    files: dict[str, StoredFile]


def cache_folder(override: Path | None) -> Path:
    if override is not None:
        return override
    if own := os.environ.get("LEGATO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "legato"


def stored_model(package: Path, version: str | None) -> Path | None:
    """The model of `version` (default: the one stored last), or None if it is not complete."""
    candidates = [package / version] if version else sorted(package.glob("[!.]*"), key=_stored_at, reverse=True)
    return next((model for candidate in candidates if (model := _intact(candidate))), None)


def _stored_at(folder: Path) -> float:
    try:
        return (folder / MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def _intact(folder: Path) -> Path | None:
    """Compares sizes only: hashing would take too long at every start."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        complete = all((folder / name).stat().st_size == file["size"] for name, file in manifest["files"].items())
        return folder / manifest["model"] if complete else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def commit(complete: Path, package: Path, manifest: Manifest) -> Path:
    """Move a complete folder to its final place and return the model in it. The caller holds the lock."""
    (complete / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2), encoding="utf-8")
    target = package / manifest.version
    shutil.rmtree(target, ignore_errors=True)
    complete.rename(target)
    return target / manifest.model


@contextmanager
def staging_folder(package: Path) -> Iterator[Path]:
    """An empty folder for a download, with this package locked. Removed at the end unless it was renamed."""
    with disk_errors_name(package):
        package.mkdir(parents=True, exist_ok=True)
        with (package / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for abandoned in package.glob(f"{PARTIAL}*"):  # by a killed process: it no longer holds the lock
                shutil.rmtree(abandoned, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=package))
            try:
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def disk_errors_name(folder: Path, variable: str = "LEGATO_CACHE") -> Iterator[None]:
    """Turns disk errors into errors that name `folder` and the variable that sets it."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise ModelError(f"cannot store models in {folder}: {reason}; set {variable} to use another folder") from None
