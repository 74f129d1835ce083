"""Whether decodes beside prompts share the launch of the prompts' attention, as tiles of one token.

Alone, a decode's attention waits for memory while the matrix units have nothing to do, and a prompt's is the opposite.
In one launch both go on at once, each on multiprocessors of its own. A tile of one token takes about half as long as
one of 128 rows; so it pays where decodes are few or have long contexts, and where the prompts have so much to compute
that the longest decode is done before them. Estimates are in microseconds, for an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from legato.kernels.attention.hopper import BLOCK_M, suits
from legato.kernels.device import limits_of
from legato.kernels.paged_kv import PagedKV, Scoring

# A launch of its own for the decodes, and bytes that it reads in a microsecond.
LAUNCH, BANDWIDTH = 6.0, 4.2e6
# A tile begins and ends; 128 keys of it with heads of 128, of one token and of 128 rows.
TILE, SINGLE_BLOCK, FULL_BLOCK = 4.0, 0.9, 1.7
KEYS = 128
# What an estimate must gain, to be right more often than not.
MARGIN = 0.8


@dataclass(frozen=True, slots=True)
class MixedLengths:
    """Of a step with decodes and prompts, on the host."""

    num_decodes: int
    decode_keys: int  # of all decodes
    longest_decode: int
    chunk_pairs: int  # queries times keys of the prompts

    def share_a_launch(self, num_kv_heads: int, group: int, head_dim: int, num_multiprocessors: int) -> bool:
        width = head_dim / 128
        of_keys = SINGLE_BLOCK * width / KEYS
        tiles = (TILE * self.num_decodes + of_keys * self.decode_keys) * num_kv_heads / num_multiprocessors
        alone = LAUNCH + self.decode_keys * num_kv_heads * head_dim * 4 / BANDWIDTH
        blocks = self.chunk_pairs * group / (BLOCK_M * KEYS)
        prompts = blocks * num_kv_heads * FULL_BLOCK * width / num_multiprocessors
        return tiles < MARGIN * alone and TILE + of_keys * self.longest_decode < MARGIN * prompts


def decodes_are_tiles(q: Tensor, kv: PagedKV, scoring: Scoring, lengths: MixedLengths) -> bool:
    """q and kv of decodes and prompts together."""
    if not suits(q, kv, scoring):
        return False
    num_kv_heads, head_dim = kv.k_cache.shape[2:]
    group = q.shape[1] // num_kv_heads
    return lengths.share_a_launch(num_kv_heads, group, head_dim, limits_of(q).num_multiprocessors)
