"""The events of the prefix tree, in order, for external routers.

A block is named by the digest of all tokens up to its end and of whose they are (`host_blocks.digest_of`). Blocks that
follow each other on a path are one entry. Nothing is recorded unless somebody asked for it (`--kv-events`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from legato.scheduling.host_blocks import Digest, digest_of
from legato.scheduling.prefix_tree import Node, PrefixTree


@dataclass(slots=True)
class StoredBlocks:
    """Blocks on one path, behind `parent` (None: the first of a prompt)."""

    digests: list[Digest]
    parent: Digest | None
    tokens: bytearray  # 8 bytes each
    adapter: int


@dataclass(slots=True)
class RemovedBlocks:
    digests: list[Digest] = field(default_factory=list)


@dataclass(slots=True)
class ClearedBlocks:
    """All of them: the shards were replaced."""


JournalEntry: TypeAlias = StoredBlocks | RemovedBlocks | ClearedBlocks


class BlockJournal:
    """Listens to a tree."""

    def __init__(self) -> None:
        self._entries: list[JournalEntry] = []

    def take(self) -> list[JournalEntry]:
        """Those since the last call."""
        entries, self._entries = self._entries, []
        return entries

    def stored(self, node: Node) -> None:
        assert node.parent is not None
        last = self._entries[-1] if self._entries else None
        digest = digest_of(node)
        parent = None if node.parent.parent is None else node.parent.digest
        if isinstance(last, StoredBlocks) and last.digests[-1] == parent:
            last.digests.append(digest)
            last.tokens += node.key
        else:
            self._entries.append(StoredBlocks([digest], parent, bytearray(node.key), _adapter(node)))

    def removed(self, node: Node) -> None:
        """While it is still in its place."""
        last = self._entries[-1] if self._entries else None
        if not isinstance(last, RemovedBlocks):
            last = RemovedBlocks()
            self._entries.append(last)
        last.digests.append(digest_of(node))

    def cleared(self) -> None:
        self._entries = [ClearedBlocks()]


def contents(tree: PrefixTree) -> list[JournalEntry]:
    """What the tree holds now, as if it had been empty before: parents come before their children."""
    journal = BlockJournal()
    journal.cleared()
    for node in tree.nodes():
        journal.stored(node)
    return journal.take()


def _adapter(node: Node) -> int:
    """The root's key begins with it."""
    while node.parent is not None:
        node = node.parent
    return int(node.key.split(b" ", 1)[0])
