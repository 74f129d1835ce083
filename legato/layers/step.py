"""One forward: T tokens of n sequences, packed end to end. Built by the server, read by every layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch

from legato.kernels.attention.paged import PagedContext
from legato.layers.lora import StepAdapters

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChunkSpans:
    """The prompt chunks of a step; they follow its decodes."""

    first_token: int  # of the step, where those of `cu_seqlens_q` begin
    cu_seqlens_q: torch.Tensor  # [num_chunks + 1] int32, counted from there
    # Their lengths, if all of them are whole prompts with nothing in the cache; such steps have a faster attention.
    whole_prompts: list[int] | None


@dataclass(frozen=True, slots=True)
class Sides:
    """Encoder and decoder tokens of a step of an encoder-decoder model. A sequence is its prompt, which the encoder
    reads, and then the decoder's tokens. The cross-attention keys of a prompt are cached in the prompt's own slots."""

    prompt_lens: list[int]  # of the prompts that the encoder reads in this step, one after the other
    encoder: torch.Tensor | None  # [sum of them] int64, their tokens' places in the step; None: there are none
    decoder: torch.Tensor | None  # [t] int64, the places of the decoder's tokens; None: all of the step
    rows: torch.Tensor  # [t] int32, the row of each of the decoder's tokens
    encoder_lens: torch.Tensor  # [t] int32, how long the prompt of that row is


@dataclass(frozen=True, slots=True)
class MutualTokens:
    """Tokens of one sequence that see each other, whichever comes first: those of an image, or of a prompt. The last of
    them are in the step, one after the other; others may be in the cache."""

    first: int  # of the step's tokens, where the group's begin
    count: int
    start: int  # where that token is in its sequence
    begin: int  # where the group is in the sequence: [begin, end)
    end: int
    row: int


@dataclass(frozen=True, slots=True)
class CrossTokens:
    """Tokens of text that attend to slots [begin, end) of their sequence, in which there are images."""

    first: int  # of the step's tokens
    count: int
    begin: int
    end: int
    row: int


@dataclass(frozen=True, slots=True)
class CrossImages:
    groups: tuple[CrossTokens, ...]
    # [max_rows, max_blocks] int32: the step's own begin with the text.
    block_tables: torch.Tensor
    sees: torch.Tensor | None  # [T, 1], 1 for tokens that see an image and else 0; None: no token does


@dataclass(frozen=True, slots=True)
class ImageEmbeddings:
    """The images of a step: embeddings that replace those of some tokens, and positions on three axes."""

    places: torch.Tensor | None  # [k] int64, tokens of the step; None: it has no image tokens
    embeddings: torch.Tensor | None  # [k, hidden_size]
    positions: torch.Tensor | None  # [3, T] int64; None for models whose images have the positions of text
    mutual: tuple[MutualTokens, ...] = ()
    cross: CrossImages | None = None  # of models whose images are beside the text

    def insert_into(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], the embeddings of the tokens; overwritten where there are images."""
        if self.places is None or self.embeddings is None:
            return x
        return x.index_copy_(0, self.places, self.embeddings.to(x.dtype))


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
    sides: Sides | None = None  # of encoder-decoder models only
    images: ImageEmbeddings | None = None  # of vision models only
    adapters: StepAdapters | None = None  # of steps with tokens that have one
    hidden: torch.Tensor | None = None  # [T, hidden_size], states from the stage before; None: this is the first
    in_last_layer: bool = False  # only the logits come after it
    _memo: dict[Hashable, object] = field(default_factory=dict)

    def needed_after_attention(self, states: torch.Tensor) -> torch.Tensor:
        """Those of [T, ...] that the rest of a layer needs after its attention. In the last layer that is the tokens
        whose logits are wanted: the others have no later layer that would read their keys and values."""
        if not self.in_last_layer:
            return states
        if self.adapters is not None:
            self.adapters.narrow(self.logits_indices)
        return self.wanted(states)

    def wanted(self, states: torch.Tensor) -> torch.Tensor:
        """Those of [T, ...] whose logits are wanted."""
        return states if self.logits_indices is None else states[self.logits_indices]

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What every layer needs and only the first one computes."""
        if key not in self._memo:
            self._memo[key] = compute()
        return cast(T, self._memo[key])
