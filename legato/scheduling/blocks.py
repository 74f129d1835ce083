"""Which KV blocks are free. The router owns the numbers, the shards own the bytes."""

from __future__ import annotations

# Block 0 is reserved: padded rows of a captured graph write there.
RESERVED_BLOCKS = 1


class BlockPool:
    """A stack of free block numbers. The block freed last is handed out first: its bytes may still be in a cache."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > RESERVED_BLOCKS, f"{num_blocks} blocks leave none to allocate"
        self.total = num_blocks - RESERVED_BLOCKS
        self._free = list(range(num_blocks - 1, RESERVED_BLOCKS - 1, -1))

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
        return taken

    def free(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))
        assert len(self._free) <= self.total, "a block was freed twice"
