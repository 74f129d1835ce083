"""The prefix tree: which full blocks hold the keys and values of which tokens, prompt or generated.

One node per block. A path from the root spells a sequence of tokens, `block_size` at a time, and the nodes on it hold
its blocks. Requests that start alike share the path. Tokens are compared as bytes (`array("q").tobytes()`), because
hashing a slice of bytes takes a fifth of the time of a tuple of integers.

Every owner has a root of its own. Whether a prefix is cached can be seen from outside, by its time and by
`cached_tokens`, so owners must not find each other's. And so has every LoRA adapter, by its number: it makes other keys
and values of the same tokens. Eviction knows no owners.

A request holds the deepest node it uses. `users` counts the holders of a node and its children that have users, so a
node without users can be evicted once its children are. Locking a prefix that others use stops at the first node that
has users already. Eviction takes leaves, least recently used first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

# The tokens of one block, or of several, 8 bytes each.
TokenBytes = bytes
TOKEN_BYTES = 8


class Node:
    __slots__ = ("block", "children", "digest", "key", "last_used", "parent", "users")

    def __init__(self, parent: Node | None, key: TokenBytes, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[TokenBytes, Node] = {}
        self.users = 0
        self.last_used = 0
        self.digest = b""  # of `host_blocks.digest_of`, once somebody asked


class TreeListener(Protocol):
    def stored(self, node: Node) -> None:
        """It is in its place."""

    def removed(self, node: Node) -> None:
        """It is still in its place."""


class PrefixTree:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.listener: TreeListener | None = None
        self._key_bytes = block_size * TOKEN_BYTES
        # As many as API keys, for each adapter: forgotten only with an adapter.
        self._roots: dict[tuple[int, str], Node] = {}
        self._num_nodes = 0
        self._num_unused = 0
        self._clock = itertools.count(1)
        # (last_used, tie-breaker, node) of leaves without users; an entry is stale once the node was used again.
        self._leaves: list[tuple[int, int, Node]] = []

    def __len__(self) -> int:
        """Blocks held by the tree."""
        return self._num_nodes

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` could give back right now."""
        return self._num_unused

    def root(self, owner: str = "", adapter: int = 0) -> Node:
        root = self._roots.get((adapter, owner))
        if root is None:
            root = self._roots[adapter, owner] = Node(None, f"{adapter} {owner}".encode(), -1)
        return root

    def drop(self, adapter: int) -> list[int]:
        """Forget what an adapter made; no request uses it. Returns the blocks."""
        gone = [key for key in self._roots if key[0] == adapter]
        nodes = [node for key in gone for node in _below(self._roots.pop(key))]
        for node in nodes:
            assert not node.users, "a request uses what an adapter made"
            if self.listener is not None:
                self.listener.removed(node)
        for node in nodes:
            node.parent = None  # its place among the leaves is void
            node.children.clear()
        self._num_nodes -= len(nodes)
        self._num_unused -= len(nodes)
        return [node.block for node in nodes]

    def match(self, root: Node, tokens: TokenBytes, max_blocks: int) -> tuple[Node, list[int]]:
        """The deepest node whose path from `root` is a prefix of `tokens`, at most `max_blocks` deep, and the blocks on
        it."""
        node, blocks, size = root, [], self._key_bytes
        for start in range(0, max_blocks * size, size):
            child = node.children.get(tokens[start : start + size])
            if child is None:
                break
            node = child
            blocks.append(node.block)
        return node, blocks

    def lock(self, node: Node) -> None:
        """One more request uses `node`, and so its whole path."""
        for step in _path(node):
            step.users += 1
            if step.users > 1:
                break
            self._num_unused -= 1

    def unlock(self, node: Node) -> None:
        now = next(self._clock)
        for step in _path(node):
            assert step.users > 0, "unlocked more often than locked"
            step.users -= 1
            if step.users:
                break
            step.last_used = now
            self._num_unused += 1
        self._offer(node)

    def extend(self, node: Node, key: TokenBytes, block: int) -> tuple[Node, bool]:
        """Move a holder of `node` one block down to `key`, and lend it `block` if the tree has none for it yet.

        Returns the child and whether the tree took the block. If not, another request got there first, and the
        caller keeps its own copy.
        """
        child = node.children.get(key)
        taken = child is None
        if child is None:
            child = node.children[key] = Node(node, key, block)
            self._num_nodes += 1
            self._num_unused += 1
            if self.listener is not None:
                self.listener.stored(child)
        self.lock(child)  # first, so that `node` never has no users in between
        if node.parent is not None:
            node.users -= 1
        return child, taken

    def evict(self, count: int, keep: Callable[[Node], None] = lambda node: None) -> list[int]:
        """Give back up to `count` unused blocks; `keep` sees each while it is still in its place."""
        blocks: list[int] = []
        while len(blocks) < count and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if last_used != node.last_used or node.users or node.children or node.parent is None:
                continue
            # The next in line is nearly always the parent, last used by the same request.
            while node.last_used == last_used and len(blocks) < count and _is_free(node):
                keep(node)
                blocks.append(node.block)
                node = self._remove(node)
            self._offer(node)
        return blocks

    def evict_beyond(self, most: int | None) -> list[int]:
        """Give back the unused blocks that are more than `most`, where there is such a limit."""
        return [] if most is None or self._num_unused <= most else self.evict(self._num_unused - most)

    def nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from _below(root)

    def _remove(self, node: Node) -> Node:
        """Returns its parent, which may be a leaf now."""
        parent = node.parent
        assert parent is not None
        if self.listener is not None:
            self.listener.removed(node)
        del parent.children[node.key]
        node.parent = None
        self._num_nodes -= 1
        self._num_unused -= 1
        return parent

    def _offer(self, node: Node) -> None:
        """Remember `node` for eviction if it is an unused leaf."""
        if not _is_free(node):
            return
        heapq.heappush(self._leaves, (node.last_used, next(self._clock), node))
        if len(self._leaves) > 2 * self._num_nodes + 64:  # mostly stale: without this, hits alone would grow it
            self._leaves = [leaf for leaf in self._leaves if leaf[0] == leaf[2].last_used and leaf[2].parent]
            heapq.heapify(self._leaves)


def _is_free(node: Node) -> bool:
    """An unused leaf."""
    return not (node.users or node.children or node.parent is None)


def _below(root: Node) -> Iterator[Node]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def _path(node: Node) -> Iterator[Node]:
    """`node` and its ancestors, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
