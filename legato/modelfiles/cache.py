"""Where models from the package index are kept.

    <cache>/pypi/<package>/.lock
                           <version>/legato.json      the manifest: what came from where, with sizes and sha256
                                     <package's files>
                           .partial-*/                being filled by the holder of the lock

A version's folder appears in one rename, manifest and all: whoever finds it finds it whole. Readers take no lock and
write nothing, so a warm cache works on a read-only disk.
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
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "it is read-only",
    errno.EACCES: "it may not be written to",
    errno.EPERM: "it may not be written to",
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
    # What `ModelFiles.open` wants, relative to the version's folder.
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
    """The model of `version`, or of the version that was stored last; None unless all its files are there."""
    candidates = [package / version] if version else sorted(package.glob("[!.]*"), key=_stored_at, reverse=True)
    return next((model for candidate in candidates if (model := _intact(candidate))), None)


def _stored_at(folder: Path) -> float:
    try:
        return (folder / MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def _intact(folder: Path) -> Path | None:
    """Sizes are compared, hashes not: that would take longer than all the rest of finding a model."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        complete = all((folder / name).stat().st_size == file["size"] for name, file in manifest["files"].items())
        return folder / manifest["model"] if complete else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def commit(filled: Path, package: Path, manifest: Manifest) -> Path:
    """Puts a filled folder in its place, for the holder of the lock, and returns the model in it."""
    (filled / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2), encoding="utf-8")
    target = package / manifest.version
    shutil.rmtree(target, ignore_errors=True)
    filled.rename(target)
    return target / manifest.model


@contextmanager
def filling(package: Path) -> Iterator[Path]:
    """An empty folder to fill, while no other process fills one for this package. Gone at the end, unless renamed."""
    with naming_folder(package):
        package.mkdir(parents=True, exist_ok=True)
        with (package / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for abandoned in package.glob(f"{PARTIAL}*"):  # by a process that was killed: the lock says it is gone
                shutil.rmtree(abandoned, ignore_errors=True)
            partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=package))
            try:
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def naming_folder(folder: Path, variable: str = "LEGATO_CACHE") -> Iterator[None]:
    """Turns what can go wrong with a disk into a sentence about `folder` and the variable that chooses it."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise ModelError(f"cannot store models in {folder}: {reason}; {variable} names another folder") from None
