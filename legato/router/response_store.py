"""The store of `/v1/responses`, shared by the HTTP workers: a file (`--response-store`), or memory.

Workers are processes, and the next request may reach another one. Their memory in common is a folder of a file system
without a disk, which is gone when the router is.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from legato.common.errors import OptionError

_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "legato-responses-"
# Of a folder that is not locked yet.
_UNNAMED: Final = ".legato-responses-"
FILE_NAME: Final = "responses.sqlite"


@contextmanager
def response_store(path: str | None, size: int) -> Iterator[str | None]:
    """The path of the file, for as long as the router runs; None where nothing is stored."""
    if size == 0:
        yield None
        return
    if path is not None:
        yield str(Path(path).absolute())
        return
    place = _MEMORY if _has_room(_MEMORY, size) else Path(tempfile.gettempdir())
    _remove_abandoned(place)
    folder, lock = _new_folder(place)
    try:
        yield str(folder / FILE_NAME)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def check_store(path: str | None, size: int) -> None:
    """Before the model is loaded, and not when the first response is to be stored. OptionError."""
    if size == 0 or path is None:
        return
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise OptionError(f"--response-store: {file.parent} is not a folder; create it first")
    try:
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))  # conversations are nobody else's business
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("BEGIN IMMEDIATE")  # reads the file, and must be allowed to write
            connection.rollback()
    except (OSError, sqlite3.Error) as error:
        raise OptionError(f"--response-store: {file} cannot be used as an SQLite file: {error}") from None


def _has_room(place: Path, size: int) -> bool:
    """Containers have 64 MB of it unless told otherwise, and shards need some for themselves."""
    with suppress(OSError):
        return os.access(place, os.W_OK) and shutil.disk_usage(place).free >= 2 * size
    return False


def _new_folder(place: Path) -> tuple[Path, int]:
    """Only for us to read, and its lock, which the kernel releases when we end. Locked before it has a name by which
    another router would take it for an abandoned one."""
    unnamed = tempfile.mkdtemp(prefix=_UNNAMED, dir=place)
    lock = _locked(Path(unnamed))
    assert lock is not None, "nobody else knows it"
    folder = place / f"{_PREFIX}{secrets.token_hex(8)}"
    os.rename(unnamed, folder)
    return folder, lock


def _remove_abandoned(place: Path) -> None:
    """Folders of routers that were killed. A lock tells, and not a process number: containers that share this memory
    number their processes from 1."""
    for folder in place.glob(f"{_PREFIX}*"):
        if (lock := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """None if its router lives, if it is gone, or if it is not ours to remove."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
