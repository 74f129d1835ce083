"""What is left alone: shares of memory that the KV cache never gets. Known without torch, for plans made beforehand."""

from __future__ import annotations

# Of a host's free memory, what a shard takes: the rest is everybody else's.
HOST_SHARE = 0.5
# Of a GPU's memory, left to fragmentation and to what libraries allocate behind torch's back.
RESERVE_SHARE, LEAST_RESERVE = 0.01, 256 * 2**20
# What the driver keeps of a captured graph for each layer, besides the tensors that it writes: some ten kernels.
LAYER_GRAPH_BYTES = 256 * 2**10


def reserve(total: int) -> int:
    """Bytes of a GPU with `total` bytes."""
    return max(LEAST_RESERVE, int(RESERVE_SHARE * total))
