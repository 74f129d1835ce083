"""Which KV blocks are free. The router owns the numbers, the shards own the bytes."""

from __future__ import annotations

# Block 0 is reserved: padded rows of a captured graph write there.
RESERVED_BLOCKS = 1


class BlockPool:
    """A stack of free block numbers. The block freed last is handed out first: its bytes may still be in a cache, and
    blocks that were never used take no memory where it comes in pages."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > RESERVED_BLOCKS, f"{num_blocks} blocks leave none to allocate"
        self.total = num_blocks - RESERVED_BLOCKS
        self._free = list(range(num_blocks - 1, RESERVED_BLOCKS - 1, -1))
        # Handed out since they were last taken by `take_used`.
        self._used: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        self._used.update(taken)
        return taken

    def take_used(self) -> list[int]:
        """Take all free blocks that have been used, in order. They hold memory; once it is given back, `free` them."""
        taken = sorted(self._used.intersection(self._free))
        if taken:
            self._used.difference_update(taken)
            self._free = [block for block in self._free if block not in set(taken)]
        return taken

    def free(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))
        assert len(self._free) <= self.total, "a block was freed twice"
