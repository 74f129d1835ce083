"""Chooses the variant of decode attention for a batch and a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from legato.kernels.device import AttentionTile, GpuLimits
from legato.kernels.language import next_power_of_two


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    extra_splits: int  # programs of a key-value head, besides one for each sequence
    min_split_len: int  # short contexts are cut into fewer
    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int


def decode_config(num_sequences: int, num_kv_heads: int) -> DecodeConfig:
    """By the programs there are before splitting. Enough of them fill the chip; few need splits for latency.

    The best of a sweep on an H200 (`python -m benchmarks.kernels --sweep --only decode_attention`).
    """
    programs = num_sequences * num_kv_heads
    # So many programs besides that all of them are on the chip at once, four or eight to a multiprocessor.
    if programs <= 64:
        extra = max((480 if programs <= 32 else 960) // num_kv_heads, 1)
        return DecodeConfig(extra, min_split_len=64, block_n=64, num_warps=4, num_stages=2)
    if programs < 512:
        extra, min_split_len = max(448 // num_kv_heads, 1), 64 if programs <= 128 else 128
        return DecodeConfig(extra, min_split_len, block_n=64, num_warps=4, num_stages=2)
    extra = max(1024 // num_kv_heads, 1)
    if programs < 1024:
        return DecodeConfig(extra, min_split_len=1024, block_n=128, num_warps=4, num_stages=3)
    # Small programs, many to a multiprocessor: while one begins or ends, the others keep reading.
    if programs < 2048:
        return DecodeConfig(extra, min_split_len=1024, block_n=64, num_warps=2, num_stages=2)
    return DecodeConfig(extra, min_split_len=1024, block_n=32, num_warps=1, num_stages=3)


def scanned(num_sequences: int) -> int:
    """Lengths at a time: few are known to every warp, without asking the others."""
    return 32 if num_sequences <= 32 else 128


def distinct_batches(most: int, num_kv_heads: int) -> list[int]:
    """Numbers of sequences, up to `most`, that use every variant of the kernel between them."""
    found: dict[tuple[int, ...], int] = {}
    for count in range(1, most + 1):
        config = decode_config(count, num_kv_heads)
        variant = (config.block_n, config.num_warps, config.num_stages, scanned(count), count == 1)
        found.setdefault(variant, count)
    return list(found.values())


def fitting(config: DecodeConfig, group: int, head_dim: int, itemsize: int, limits: GpuLimits) -> DecodeConfig:
    """With fewer stages, then fewer keys per iteration, as far as the shared memory of the device requires; with more
    warps for many query heads, whose sums are in registers."""
    rows = next_power_of_two(group, 16)
    num_warps = min(rows * next_power_of_two(head_dim, 16) * itemsize // 8192, 8)
    config = replace(config, num_warps=max(config.num_warps, num_warps))
    while not AttentionTile(rows, config.block_n, head_dim, itemsize, config.num_stages).fits(limits):
        if config.num_stages > 2:
            config = replace(config, num_stages=2)
        elif config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        elif config.num_stages > 1:
            config = replace(config, num_stages=1)
        else:
            break
    return config
