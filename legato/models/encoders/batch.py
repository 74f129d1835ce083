"""Batches of texts of any length without padding: their tokens are concatenated, sorted by length.

Everything but attention works on single tokens. Attention works on groups of texts: on a CPU on those of equal length,
which stand behind each other and are a view of the batch; on a GPU, where launches cost more than padding, on those of
similar length, which are gathered and padded.

tokens   ├─ 5 ─┼─ 5 ─┼── 7 ──┼──── 12 ────┼──── 12 ────┼───── 13 ─────┤
CPU      ├── 2 x 5 ──┼ 1 x 7 ┼───────── 2 x 12 ────────┼─── 1 x 13 ───┤
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby

import torch
import torch.nn.functional as F

# On a GPU texts are attended together if the shortest has at least this share of the tokens of the longest.
SIMILAR = 0.75


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids; `second_start` is where the second text of a pair begins, 0 if there is none."""

    input_ids: Sequence[int]
    second_start: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts that are attended together: `count` of up to `length` tokens, the first at token `start`."""

    start: int
    count: int
    length: int
    # Of texts that differ in length. Places of their tokens [count, length], those of padding repeat the last, and
    # which of them are tokens.
    places: torch.Tensor | None = None
    is_token: torch.Tensor | None = None


class TextBatch:
    def __init__(self, texts: Sequence[EncodedText], device: torch.device) -> None:
        """`order` says which text stands where: the nth is texts[order[n]]."""
        self.order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        self.texts = [texts[i] for i in self.order]
        self.lengths = [len(text) for text in self.texts]
        self.device = device
        self.ends = list(accumulate(self.lengths))
        self.groups = self._groups(SIMILAR if device.type == "cuda" else 1.0)
        self._masks: dict[tuple[int, bool, bool], torch.Tensor] = {}  # all layers with a window have the same

    @property
    def num_tokens(self) -> int:
        return self.ends[-1]

    @cached_property
    def input_ids(self) -> torch.Tensor:
        return torch.tensor(list(chain.from_iterable(text.input_ids for text in self.texts)), device=self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Of each token in its text, from 0."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(self.device)

    @cached_property
    def type_ids(self) -> torch.Tensor:
        """1 for tokens of the second text of a pair."""
        types = [self._types(text) for text in self.texts]
        return torch.cat(types).to(self.device)

    @staticmethod
    def _types(text: EncodedText) -> torch.Tensor:
        types = torch.zeros(len(text), dtype=torch.int64)
        if text.second_start:
            types[text.second_start :] = 1
        return types

    @cached_property
    def firsts(self) -> torch.Tensor:
        """The place of each text's first token."""
        return self.lasts - torch.tensor(self.lengths, device=self.device) + 1

    @cached_property
    def lasts(self) -> torch.Tensor:
        return torch.tensor(self.ends, device=self.device) - 1

    @cached_property
    def owners(self) -> torch.Tensor:
        """The text of each token."""
        counts = torch.tensor(self.lengths)
        return torch.repeat_interleave(torch.arange(len(self.lengths)), counts).to(self.device)

    def mask(self, group: TextGroup, causal: bool, window: int) -> torch.Tensor | None:
        """[texts or 1, 1, tokens or 1, tokens]: who sees whom. None: everybody, or, with `causal`, all before."""
        narrows = 0 < window < group.length
        if not narrows and (group.is_token is None or causal):
            return None  # what pads a text stands behind all of its tokens
        key = group.start, causal, narrows
        if key not in self._masks:
            self._masks[key] = self._make_mask(group, causal, window if narrows else 0)
        return self._masks[key]

    def _make_mask(self, group: TextGroup, causal: bool, window: int) -> torch.Tensor:
        place = torch.arange(group.length, device=self.device)
        mask = torch.ones_like(place, dtype=torch.bool)[None]
        if window:
            distance = place[:, None] - place
            mask = (distance.abs() < window) & (distance >= 0 if causal else mask)
        return mask if group.is_token is None else mask & group.is_token[:, None, None]

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> [texts, size], in float32."""
        sums = torch.zeros(len(self.lengths), x.shape[-1], dtype=torch.float32, device=x.device)
        sums.index_add_(0, self.owners, x.float())
        return sums / torch.tensor(self.lengths, dtype=torch.float32, device=x.device)[:, None]

    def _groups(self, similar: float) -> list[TextGroup]:
        groups: list[TextGroup] = []
        first = 0
        equal = [len(list(run)) for _, run in groupby(self.lengths)]
        for count in equal if similar == 1.0 else self._similar_spans(similar):
            start = self.ends[first] - self.lengths[first]
            lengths = self.lengths[first : first + count]
            groups.append(self._group(start, lengths))
            first += count
        return groups

    def _similar_spans(self, similar: float) -> list[int]:
        """From the longest text down, so that padding is measured against the longest of a group."""
        spans: list[int] = []
        longest = 0
        for length in reversed(self.lengths):
            if spans and length >= similar * longest:
                spans[-1] += 1
            else:
                spans.append(1)
                longest = length
        return spans[::-1]

    def _group(self, start: int, lengths: list[int]) -> TextGroup:
        longest = lengths[-1]
        if lengths[0] == longest:
            return TextGroup(start, len(lengths), longest)
        counts = torch.tensor(lengths)
        firsts = start + torch.tensor([0, *accumulate(lengths)][:-1])
        column = torch.arange(longest)[None]
        places = firsts[:, None] + torch.minimum(column, counts[:, None] - 1)
        is_token = column < counts[:, None]
        return TextGroup(start, len(lengths), longest, places.to(self.device), is_token.to(self.device))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: TextBatch, *, causal: bool = False, window: int = 0
) -> torch.Tensor:
    """q [T, heads, dim], k and v [T, kv heads, dim] -> [T, heads * dim]. Tokens see those of their own text: all,
    with `causal` none behind them, with `window` none that is so many places away or more."""
    out = torch.empty(q.shape[0], q.shape[1] * v.shape[2], dtype=q.dtype, device=q.device)
    shares_heads = q.shape[1] != k.shape[1]
    for group in batch.groups:
        mask = batch.mask(group, causal, window)
        queries, keys, values = (_gather(x, group) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal and mask is None,
            enable_gqa=shares_heads,
        ).transpose(1, 2)
        _scatter(out, attended.reshape(group.count, group.length, -1), group)
    return out


def _gather(x: torch.Tensor, group: TextGroup) -> torch.Tensor:
    """[T, heads, dim] -> [texts, heads, tokens, dim]."""
    if group.places is not None:
        return x[group.places].transpose(1, 2)
    tokens = x[group.start : group.start + group.count * group.length]
    return tokens.view(group.count, group.length, *x.shape[1:]).transpose(1, 2)


def _scatter(out: torch.Tensor, attended: torch.Tensor, group: TextGroup) -> None:
    if group.places is not None:
        out[group.places[group.is_token]] = attended[group.is_token]
    else:
        out[group.start : group.start + group.count * group.length] = attended.flatten(0, 1)
