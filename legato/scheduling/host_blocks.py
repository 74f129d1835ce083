"""Tracks which evicted blocks are in host memory (`--kv-offload-gb`), and plans their copies.

The router owns the slots there as it owns blocks; the shards own the bytes. A block that the prefix tree evicts is
copied out before anything overwrites it, and a request that needs it again gets a block of its own into which it is
copied back, which enters the tree with the request's others. Its slot keeps what it has while no other block needs a
slot: full blocks do not change, so that the next eviction of this one copies nothing. Blocks are found by a digest of
all tokens up to their end and of whose they are, so none is found by others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from legato.scheduling.prefix_tree import TOKEN_BYTES, Node, TokenBytes

Digest = bytes
# (block, slot) or (slot, block): from, to.
Copies = list[tuple[int, int]]


class HostBlocks:
    def __init__(self, num_slots: int, block_size: int) -> None:
        self._key_bytes = block_size * TOKEN_BYTES
        self._free = list(range(num_slots - 1, -1, -1))
        # Least recently copied out first.
        self._slots: OrderedDict[Digest, int] = OrderedDict()
        # Of blocks that were copied back, least recently first: these make room before all others.
        self._returned: OrderedDict[Digest, int] = OrderedDict()
        self._is_used = num_slots > 0
        # Blocks whose step has no result yet, and the number of their plan: if it fails, they may not have been copied.
        self._leaving: dict[Digest, int] = {}
        self._num_planned = self._num_landed = 0
        # Of the plan that is being made: copies, and slots that it reads, which no eviction may take.
        self._out: dict[Digest, tuple[int, int]] = {}
        self._in: Copies = []
        self._read: dict[Digest, int] = {}

    def __len__(self) -> int:
        """Blocks in host memory."""
        return len(self._slots) + len(self._returned)

    def keep(self, node: Node) -> None:
        """The tree evicts `node`."""
        if not self._is_used:
            return
        digest = digest_of(node)
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = self._returned.pop(digest, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._forget_oldest()
            if slot is None:
                return
            self._out[digest] = (node.block, slot)
        self._slots[digest] = slot

    def _forget_oldest(self) -> int | None:
        oldest = self._returned or self._slots
        if not oldest:  # all slots are read by the plan that is being made
            return None
        digest, slot = oldest.popitem(last=False)
        self._out.pop(digest, None)
        return slot

    def match(self, node: Node, tokens: TokenBytes, num_found: int, max_blocks: int) -> list[Digest]:
        """Blocks that follow `node`, the last of `num_found` on the device, in a sequence of these tokens."""
        found: list[Digest] = []
        if not len(self) or num_found >= max_blocks:
            return found
        digest, size, slots, returned = digest_of(node), self._key_bytes, self._slots, self._returned
        out, leaving = self._out, self._leaving
        for start in range(num_found * size, max_blocks * size, size):
            digest = _digest(digest, tokens[start : start + size])
            # What is on its way out is not there yet.
            if not (digest in slots or digest in returned) or digest in out or digest in leaving:
                break
            found.append(digest)
        return found

    def reserve(self, found: Sequence[Digest]) -> list[int]:
        """Slots that no eviction may take while room is made for their blocks."""
        slots, returned = self._slots, self._returned
        taken = [slots.pop(digest) if digest in slots else returned.pop(digest) for digest in found]
        self._read.update(zip(found, taken, strict=True))
        return taken

    def add_copies_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._in += zip(slots, blocks, strict=True)

    def take_copies(self) -> tuple[Copies, Copies]:
        """What the plan asks for: copies out, then copies in. They run before its step and those of the next plan."""
        out, back = list(self._out.values()), self._in
        self._num_planned += 1
        self._leaving.update(dict.fromkeys(self._out, self._num_planned))
        self._returned.update(self._read)
        self._out, self._in, self._read = {}, [], {}
        return out, back

    def cancel(self) -> None:
        """There is no plan after all: nothing is copied out before its block is used again."""
        for digest in self._out:
            self._free.append(self._slots.pop(digest))
        self._out = {}
        assert not self._in, "a plan that brings blocks back has a row for them"

    def land(self, out: Copies, *, failed: bool) -> None:
        """The result of the oldest plan is here, with its copies."""
        self._num_landed += 1
        if out:
            for digest in [each for each, number in self._leaving.items() if number <= self._num_landed]:
                del self._leaving[digest]
            if failed:
                self._forget(out)

    def _forget(self, out: Copies) -> None:
        """Whether these were copied is not known."""
        slots = {slot for _, slot in out}
        for kept in (self._slots, self._returned):
            for digest in [digest for digest, slot in kept.items() if slot in slots]:
                self._free.append(kept.pop(digest))


def digest_of(node: Node) -> Digest:
    """Of the tokens on the path to `node`, the owner and the adapter; computed once."""
    missing = []
    while not node.digest:
        missing.append(node)
        if node.parent is None:
            break
        node = node.parent
    digest = node.digest
    for each in reversed(missing):
        digest = each.digest = _digest(digest, each.key)
    return digest


def _digest(before: Digest, key: TokenBytes) -> Digest:
    return blake2b(before + key, digest_size=16).digest()
