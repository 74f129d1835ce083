"""Estimates which prompt prefixes each replica has cached, from the bytes of the prompts that were sent to it.

The balancer has no tokenizer and needs none: a prompt is cut into chunks of bytes, and a chunk is named by a hash of
everything up to its end, as a block of the prefix tree is named by its path. What a replica was sent is what its tree
holds, until it evicts. So a replica's chunks are forgotten in the order in which its tree evicts (least recently used
first) once they are more than its KV cache has room for, and all at once when it says that its tree was emptied
(`ReplicaState.epoch`). A wrong guess costs one computed prompt, never a wrong answer.
"""

from __future__ import annotations

CHUNK = 128
# Of a prompt, with most tokenizers and languages.
BYTES_PER_TOKEN = 4
TOKENS_PER_CHUNK = CHUNK // BYTES_PER_TOKEN
# Chunks to remember of a replica that does not say how much it holds.
DEFAULT_CAPACITY = 1 << 16


def chain_of(scope: bytes, text: bytes) -> list[int]:
    """The names of the full chunks of a text. `scope` is what caches are not shared beyond: the key and the model."""
    name = hash(scope)
    chain = []
    for start in range(0, len(text) - CHUNK + 1, CHUNK):
        name = hash((name, text[start : start + CHUNK]))
        chain.append(name)
    return chain


class PrefixIndex:
    """Replicas are numbered from 0."""

    def __init__(self) -> None:
        # Chunk -> replicas that hold it, one bit each.
        self._holders: dict[int, int] = {}
        # Replica -> its chunks, least recently used first; and how many it may have.
        self._held: dict[int, dict[int, None]] = {}
        self._capacities: dict[int, int] = {}

    def set_capacity(self, replica: int, num_tokens: int) -> None:
        self._capacities[replica] = max(1, num_tokens // TOKENS_PER_CHUNK)
        self._evict(replica)

    def match(self, chain: list[int]) -> dict[int, int]:
        """Replica -> leading chunks that it holds, for those that hold any."""
        depths: dict[int, int] = {}
        left = -1
        for depth, name in enumerate(chain):
            holders = self._holders.get(name, 0) & left
            if depth:
                depths |= dict.fromkeys(_numbers(left & ~holders), depth)
            left = holders
            if not left:
                return depths
        return depths | dict.fromkeys(_numbers(left), len(chain)) if chain else depths

    def add(self, replica: int, chain: list[int]) -> None:
        """It was sent such a prompt. Deep chunks are the older ones of a chain: a tree evicts leaves first."""
        held, holders, bit = self._held.setdefault(replica, {}), self._holders, 1 << replica
        for name in reversed(chain):
            held.pop(name, None)
            held[name] = None
            holders[name] = holders.get(name, 0) | bit
        self._evict(replica)

    def forget(self, replica: int) -> None:
        """Its cache is empty, or it is gone."""
        for name in self._held.pop(replica, ()):
            self._drop(replica, name)

    def num_chunks(self, replica: int) -> int:
        return len(self._held.get(replica, ()))

    def _evict(self, replica: int) -> None:
        held = self._held.get(replica, {})
        excess = len(held) - self._capacities.get(replica, DEFAULT_CAPACITY)
        while excess > 0:
            name = next(iter(held))
            del held[name]
            self._drop(replica, name)
            excess -= 1

    def _drop(self, replica: int, name: int) -> None:
        left = self._holders[name] & ~(1 << replica)
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]


def _numbers(bits: int) -> list[int]:
    """The numbers of the bits that are set."""
    found = []
    while bits > 0:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
