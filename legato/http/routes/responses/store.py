"""Responses by their id, for those who come back: `GET`, `previous_response_id`, references to the items of their
output, and responses in the background.

One SQLite file that all HTTP workers share, because the next request may reach another worker. It is bounded: the
oldest responses of the key that keeps most make room for new ones. A response belongs to the key that asked for it;
for everybody else it does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Seconds to wait for another worker's write.
_PATIENCE: Final = 5.0
# Writes of events between two looks at how large the store has become.
_EVENTS_UNTIL_LOOK: Final = 64
# Responses that continue each other.
MAX_CHAIN: Final = 1000
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, previous TEXT,
    size INTEGER NOT NULL, owner TEXT, input BLOB NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS sizes ON responses (tenant, number, size);
CREATE TABLE IF NOT EXISTS events (id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (id, number));
CREATE TABLE IF NOT EXISTS items (id TEXT PRIMARY KEY, response TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS items_of ON items (response);
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    id: str
    # JSON: the items of the request, and the response.
    input: bytes
    body: bytes
    previous: str | None = None
    # The process that still works on it, if one does.
    owner: str | None = None

    @property
    def size(self) -> int:
        return len(self.input) + len(self.body)

    @property
    def is_abandoned(self) -> bool:
        """A process was to complete it, and is gone."""
        return self.owner is not None and not _is_alive(self.owner)


class ResponseStore:
    """Never blocks the event loop: all work is done by one thread."""

    def __init__(self, path: str | None, max_size: int) -> None:
        """Without a path, in memory."""
        self._path = ":memory:" if path is None else path
        self._max_size = max_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._connection: sqlite3.Connection | None = None

    @property
    def is_enabled(self) -> bool:
        return self._max_size > 0

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def put(self, tenant: str, stored: StoredResponse) -> bool:
        """Keeps it, and makes room for it. False: it is larger than all the room there is."""

        def put(db: sqlite3.Connection) -> bool:
            db.execute(
                "INSERT OR REPLACE INTO responses (id, tenant, previous, size, owner, input, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    stored.id, tenant, stored.previous, stored.size, stored.owner, stored.input,
                    stored.body,
                ),
            )  # fmt: skip
            _index_items(db, stored.id, stored.body)
            self._make_room(db)
            return _row(db, tenant, stored.id) is not None

        return await self._run(put)

    async def finish(self, tenant: str, response_id: str, body: bytes, last_event: bytes | None = None) -> bool:
        """A response in the background has come to its end. False: somebody cancelled or deleted it meanwhile."""

        def finish(db: sqlite3.Connection) -> bool:
            if not _replace_body(db, tenant, response_id, body):
                return False
            db.execute("UPDATE responses SET owner = NULL WHERE id = ?", (response_id,))
            _index_items(db, response_id, body)
            if last_event is not None:
                (number,) = db.execute("SELECT MAX(number) FROM events WHERE id = ?", (response_id,)).fetchone()
                _add_event(db, response_id, 0 if number is None else number + 1, last_event)
            self._make_room(db)
            return True

        return await self._run(finish)

    async def update(self, tenant: str, response_id: str, body: bytes) -> None:
        """A response in the background, unless it has ended."""
        await self._run(lambda db: _replace_body(db, tenant, response_id, body))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        return await self._run(lambda db: _row(db, tenant, response_id))

    async def chain(self, tenant: str, response_id: str, max_size: int) -> list[StoredResponse] | None:
        """A response and those that it continues, the first of them first. None if one of them is not there, or if
        they are too long together."""

        def chain(db: sqlite3.Connection) -> list[StoredResponse] | None:
            found: list[StoredResponse] = []
            wanted: str | None = response_id
            while wanted is not None:
                stored = _row(db, tenant, wanted)
                if stored is None or len(found) == MAX_CHAIN or sum(each.size for each in found) > max_size:
                    return None
                found.append(stored)
                wanted = stored.previous
            return found[::-1]

        return await self._run(chain)

    async def delete(self, tenant: str, response_id: str) -> bool:
        def delete(db: sqlite3.Connection) -> bool:
            found = _row(db, tenant, response_id) is not None
            if found:
                _drop(db, response_id)
            return found

        return await self._run(delete)

    async def items(self, tenant: str, item_ids: list[str], max_size: int) -> dict[str, dict[str, Any]]:
        """Items of the output of responses, by their ids; those that are not there are missing. Not all of them if
        their responses are too long together."""
        asked = (
            "SELECT responses.id FROM items JOIN responses ON responses.id = items.response"
            " WHERE items.id = ? AND tenant = ?"
        )

        def items(db: sqlite3.Connection) -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {}
            size = 0
            for item_id in item_ids:
                row = None if item_id in found else db.execute(asked, (item_id, tenant)).fetchone()
                stored = None if row is None else _row(db, tenant, row[0])
                if stored is None:
                    continue
                size += len(stored.body)
                if size > max_size:
                    break
                found |= {item["id"]: item for item in _output(stored.body)}
            return found

        return await self._run(items)

    async def is_running(self, response_id: str) -> bool:
        """Whether a process is still to complete it: not if it was cancelled or deleted."""
        asked = "SELECT 1 FROM responses WHERE id = ? AND owner IS NOT NULL"
        return await self._run(lambda db: db.execute(asked, (response_id,)).fetchone() is not None)

    # ---- events of responses in the background --------------------------------------------------------------------

    async def add_event(self, response_id: str, number: int, data: bytes) -> None:
        def add(db: sqlite3.Connection) -> None:
            _add_event(db, response_id, number, data)
            if number % _EVENTS_UNTIL_LOOK == 0:
                self._make_room(db)

        await self._run(add)

    async def events(self, response_id: str, after: int) -> list[tuple[int, bytes]]:
        """Those with a greater number."""
        asked = "SELECT number, data FROM events WHERE id = ? AND number > ? ORDER BY number"
        return await self._run(lambda db: db.execute(asked, (response_id, after)).fetchall())

    # ---- in the thread --------------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            if self._connection is None:
                self._connection = _open(self._path)
            with self._connection:  # one transaction
                return work(self._connection)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _make_room(self, db: sqlite3.Connection) -> None:
        """Responses that are still growing are dropped last."""
        while True:
            sizes = db.execute("SELECT tenant, SUM(size) FROM responses GROUP BY tenant").fetchall()
            if sum(size for _, size in sizes) <= self._max_size:
                return
            largest, _ = max(sizes, key=lambda each: each[1])
            oldest = "SELECT id FROM responses WHERE tenant = ? ORDER BY owner IS NOT NULL, number LIMIT 1"
            _drop(db, db.execute(oldest, (largest,)).fetchone()[0])


def _open(path: str) -> sqlite3.Connection:
    if path != ":memory:":  # conversations are nobody else's business
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, timeout=_PATIENCE)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(_SCHEMA)
    return connection


def _row(db: sqlite3.Connection, tenant: str, response_id: str) -> StoredResponse | None:
    asked = "SELECT id, input, body, previous, owner FROM responses WHERE id = ? AND tenant = ?"
    found = db.execute(asked, (response_id, tenant)).fetchone()
    return None if found is None else StoredResponse(*found)


def _replace_body(db: sqlite3.Connection, tenant: str, response_id: str, body: bytes) -> bool:
    """Of a response that somebody works on. False: nobody does."""
    done = db.execute(
        "UPDATE responses SET size = size - length(body) + ?, body = ?"
        " WHERE id = ? AND tenant = ? AND owner IS NOT NULL",
        (len(body), body, response_id, tenant),
    )
    return done.rowcount == 1


def _add_event(db: sqlite3.Connection, response_id: str, number: int, data: bytes) -> None:
    """Events count as a part of their response. One that was deleted has no more of them."""
    grown = db.execute("UPDATE responses SET size = size + ? WHERE id = ?", (len(data), response_id))
    if grown.rowcount == 1:
        db.execute("INSERT INTO events VALUES (?, ?, ?)", (response_id, number, data))


def _drop(db: sqlite3.Connection, response_id: str) -> None:
    db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
    db.execute("DELETE FROM events WHERE id = ?", (response_id,))
    db.execute("DELETE FROM items WHERE response = ?", (response_id,))


def _index_items(db: sqlite3.Connection, response_id: str, body: bytes) -> None:
    rows = [(item["id"], response_id) for item in _output(body)]
    db.executemany("INSERT OR REPLACE INTO items VALUES (?, ?)", rows)


def _output(body: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(body)["output"]
    return found


def this_process() -> str:
    """Its number, and when it started: numbers are given again."""
    return f"{os.getpid()}:{_start_of(os.getpid())}"


def _is_alive(owner: str) -> bool:
    number, _, start = owner.partition(":")
    return _start_of(int(number)) == start


def _start_of(number: int) -> str:
    """When a process started, in ticks; empty if there is none, or no /proc to ask."""
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
