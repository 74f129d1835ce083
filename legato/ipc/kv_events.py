"""What enters and leaves a server's prefix cache, as routers outside read it: JSON from GET /replica/events, and vLLM's
KV events over ZeroMQ, which llm-d, Dynamo and SGLang's router understand.

vLLM's format, by its `distributed/kv_events.py`: a message of three frames, which are the topic, a number of 8 bytes
(big-endian) and MessagePack of `[time, [event, …], rank]`, where an event is an array that begins with its name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from legato.scheduling.journal import ClearedBlocks, JournalEntry, RemovedBlocks, StoredBlocks

# Where the blocks are.
MEDIUM = "GPU"


class KvEvent(Struct, frozen=True, omit_defaults=True):
    kind: Literal["stored", "removed", "cleared"]
    # Of blocks: each names all tokens up to the end of the block, and whose they are.
    hashes: list[str] = []
    # The block before the first of them; null: there is none.
    parent: str | None = None
    # Of all these blocks.
    token_ids: list[int] = []
    # Number of the LoRA adapter; 0: none.
    adapter: int = 0


class KvEventPage(Struct, frozen=True):
    """Response of GET /replica/events."""

    # The number to ask with the next time.
    last: int
    # Whether the events are all that the cache holds, because those after the number asked with are not known any more.
    is_complete: bool
    block_size: int
    events: list[KvEvent]


class _Stored(Struct, tag="BlockStored", array_like=True, frozen=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class _Removed(Struct, tag="BlockRemoved", array_like=True, frozen=True):
    block_hashes: list[int]
    medium: str


class _Cleared(Struct, tag="AllBlocksCleared", array_like=True, frozen=True):
    pass


_VllmEvent: TypeAlias = _Stored | _Removed | _Cleared
_encode = msgspec.msgpack.Encoder().encode


def readable(entry: JournalEntry) -> KvEvent:
    match entry:
        case StoredBlocks(digests, parent, tokens, adapter):
            hashes = [digest.hex() for digest in digests]
            return KvEvent("stored", hashes, parent.hex() if parent else None, _token_ids(tokens), adapter)
        case RemovedBlocks(digests):
            return KvEvent("removed", [digest.hex() for digest in digests])
        case ClearedBlocks():
            return KvEvent("cleared")


def vllm_batch(entries: Iterable[JournalEntry], block_size: int, at: float) -> bytes:
    """`at` is the time of day, in seconds."""
    return _encode([at, [_vllm_event(entry, block_size) for entry in entries], 0])


def _vllm_event(entry: JournalEntry, block_size: int) -> _VllmEvent:
    match entry:
        case StoredBlocks(digests, parent, tokens, adapter):
            before = None if parent is None else _number(parent)
            numbers = [_number(digest) for digest in digests]
            return _Stored(numbers, before, _token_ids(tokens), block_size, adapter or None, MEDIUM)
        case RemovedBlocks(digests):
            return _Removed([_number(digest) for digest in digests], MEDIUM)
        case ClearedBlocks():
            return _Cleared()


def _number(digest: bytes) -> int:
    """Of 64 bits, as vLLM has them."""
    return int.from_bytes(digest[:8], "big")


def _token_ids(tokens: bytes | bytearray) -> list[int]:
    return array("q", bytes(tokens)).tolist()
