"""One forward: T tokens of n sequences, packed end to end. Built by the server, read by every layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch

from legato.kernels.paged_attention import PagedContext

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChunkSpans:
    """The prompt chunks of a step, which stand behind its decodes."""

    cu_seqlens_q: torch.Tensor  # [num_chunks + 1] int32, counted from the first chunk's first token
    # Their lengths, if all of them are whole prompts with nothing in the cache; such steps have a faster attention.
    whole_prompts: list[int] | None


@dataclass(frozen=True, slots=True)
class Step:
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, place of each token in its sequence
    slots: torch.Tensor  # [T] int64, where the token's keys and values go
    logits_indices: torch.Tensor | None  # [m] int64, the tokens whose logits are wanted; None: all
    num_decodes: int  # leading sequences that bring one token
    rows: torch.Tensor  # [n] int32, the sequences' rows in block_tables
    block_tables: torch.Tensor  # [max_rows, max_blocks] int32
    context_lens: torch.Tensor  # [n] int32, tokens of each sequence, those of this step included
    chunks: ChunkSpans | None
    on_host: PagedContext | None  # the same context as the CPU path wants it; None on other devices
    _memo: dict[Hashable, object] = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What every layer needs and only the first one computes."""
        if key not in self._memo:
            self._memo[key] = compute()
        return cast(T, self._memo[key])
