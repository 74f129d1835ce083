"""Logits in, one token per row out, for a whole batch at once.

The order is fixed here and nowhere else:

    the model's logits ──► log probabilities that are reported
      │  watermark            likelier green tokens
      │  logit bias           what the client adds to single tokens
      │  repetition penalty   tokens of the prompt and of the text so far
      │  frequency penalty    tokens generated, for each time
      │  presence penalty     tokens generated, once
      │  no end yet           tokens that end a text, while it is shorter than its client wants
      │  grammar              nothing but what it allows
      │    rows that do not sample take the highest score here; of equal ones the lowest id
      │  temperature
      │  top_k ► top_p ► typical_p ► min_p
      ▼  choice               by one random number, a function of the request's seed and position

Every row of a batch may ask for something else. What no row asks for is not computed; what some ask for is computed
for those rows together. Nothing here waits for the device, except for the watermark, whose lists are made by the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from legato.pb.generate_pb2 import NextTokenChooserParameters
from legato.sampling import blocks, filters
from legato.sampling.allowed import Allowed
from legato.sampling.logprobs import HUGE, LikeliestTokens, finite, top_tokens
from legato.sampling.params import Column, Feature, RowParams
from legato.sampling.penalties import TokenHistory
from legato.sampling.randomness import STRIDE, uniform
from legato.sampling.rows import BatchPart, Composition, RowTable, on_device
from legato.sampling.watermark import GreenLists


@dataclass(frozen=True, slots=True)
class Sampled:
    """What became of the n rows of a batch. The tensors are on the device: reading them is what waits for it."""

    token_ids: Tensor  # [n] int64
    logprobs: Tensor  # [n] float32, of the model itself
    top: LikeliestTokens | None  # only if a row asked for it


class Sampler:
    """Owns what sampling must remember of each row. Calls take effect in the order in which they are made."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        *,
        watermark_gamma: float = 0.5,
        watermark_delta: float = 2.0,
    ) -> None:
        self.vocab_size = vocab_size
        self._table = RowTable(max_rows, device)
        self._history = TokenHistory(vocab_size, max_rows, device)
        self._greens = GreenLists(vocab_size, device, watermark_gamma, watermark_delta)
        self._composition = Composition(self._table, [], vocab_size)

    @torch.inference_mode()
    def set_row(
        self,
        row: int,
        parameters: NextTokenChooserParameters,
        prompt_ids: np.ndarray | list[int],
        generated_ids: np.ndarray | list[int],
        top_n_tokens: int = 0,
    ) -> None:
        """A request enters a row, for the first time or, after it was preempted, with what it has generated so far.

        Nothing of the row's former request remains. ValueError, and a row left as it was, for token ids that the
        model does not have.
        """
        params = RowParams.read(parameters, top_n_tokens)
        for name, ids in (("token_bias", parameters.token_bias), ("end_token_ids", parameters.end_token_ids)):
            for token in ids:
                if token >= self.vocab_size:
                    raise ValueError(f"{name}: {token} is not in the vocabulary of {self.vocab_size} tokens")
        if Feature.REPETITION in params.features:
            self._history.begin_seen(row, np.concatenate((prompt_ids, generated_ids)))
        if Feature.COUNTS in params.features:
            self._history.begin_counts(row, generated_ids)
        last_token = next((int(ids[-1]) for ids in (generated_ids, prompt_ids) if len(ids)), 0)
        self._table.write(row, params, len(generated_ids), last_token)

    def is_greedy(self, rows: list[int]) -> bool:
        """Whether these rows want the likeliest token of the logits as they are, and nothing besides.

        Asked every step: where no row asks for anything it looks at none.
        """
        return not self._table.all_users or self._table.all_users.isdisjoint(rows)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: list[int], allowed: Allowed | None = None) -> Sampled:
        """One token for each of the rows, whose logits are logits [n, V], and every row one position further."""
        if not self._composition.describes(self._table, rows):
            self._composition = Composition(self._table, rows, self.vocab_size)
        return self._sample(logits, self._composition, allowed)

    def is_memoryless(self, rows: list[int]) -> bool:
        """Whether what these rows choose depends on the tokens before through the logits alone."""
        return all(self._table.users[feature].isdisjoint(rows) for feature in _REMEMBERING)

    @torch.inference_mode()
    def sample_ahead(self, logits: Tensor, rows: list[int], ahead: Tensor) -> Sampled:
        """What rows would choose from logits [n, V] if they were ahead [n] positions further on, with what is known of
        them now. Nothing is taken note of, and a row may be there several times."""
        return self._sample(logits, Composition(self._table, rows, self.vocab_size), None, ahead)

    def advance(self, rows: list[int], counts: list[int]) -> None:
        """Memoryless rows go on by so many positions."""
        drawing = [
            (row, count) for row, count in zip(rows, counts, strict=True) if row in self._table.users[Feature.SAMPLE]
        ]
        if drawing:
            numbers = on_device(torch.tensor(drawing), self._table.device)
            self._table.counters.index_add_(0, numbers[:, 0], numbers[:, 1] * STRIDE)

    def _sample(
        self, logits: Tensor, batch: Composition, allowed: Allowed | None, ahead: Tensor | None = None
    ) -> Sampled:
        raw = finite(logits)
        token_ids = self._choose(self._adjust(raw, batch, allowed), batch, ahead)
        if ahead is None:
            self._record(token_ids, batch)
        logprobs = raw.log_softmax(-1)
        top = None
        if (part := batch.parts.get(Feature.TOP_TOKENS)) is not None:
            top = top_tokens(part.take(logprobs), list(batch.top_n), list(batch.top_n.values()))
        return Sampled(token_ids, logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1), top)

    def _adjust(self, raw: Tensor, batch: Composition, allowed: Allowed | None) -> Tensor:
        """The scores that tokens are chosen by: raw itself, unless a row changes its own."""
        parts = batch.parts
        if parts.keys().isdisjoint(_ADJUSTING) and allowed is None:
            return raw
        scores = raw.clone()
        if (part := parts.get(Feature.WATERMARK)) is not None:
            with part.edit(scores) as lines:
                self._greens.favour(lines, self._table.last_tokens.index_select(0, part.rows).tolist())
        if Feature.BIAS in parts:
            scores.view(-1).index_add_(0, batch.bias_places, batch.bias_values)
        if (part := parts.get(Feature.REPETITION)) is not None:
            with part.edit(scores) as lines:
                self._history.penalise_seen(lines, part.rows, part.number(Column.repetition_penalty))
        if (part := parts.get(Feature.COUNTS)) is not None:
            frequency, presence = part.number(Column.frequency_penalty), part.number(Column.presence_penalty)
            with part.edit(scores) as lines:
                self._history.penalise_counts(lines, part.rows, frequency, presence)
        if Feature.NO_END_YET in parts:  # last: no bias outweighs it
            scores.view(-1).index_fill_(0, batch.end_places, -HUGE)
        if allowed is not None:
            allowed.restrict(scores)
        return scores

    def _choose(self, scores: Tensor, batch: Composition, ahead: Tensor | None) -> Tensor:
        drawing = batch.parts.get(Feature.SAMPLE)
        if drawing is None:
            return blocks.argmax(scores)
        counters = self._table.counters.index_select(0, drawing.rows)
        if ahead is None:
            self._table.counters.index_copy_(0, drawing.rows, counters + STRIDE)
        else:
            counters += drawing.take(ahead) * STRIDE
        drawn = self._draw(drawing.take(scores), drawing, batch, counters)
        if drawing.whole:
            return drawn
        token_ids = blocks.argmax(scores)
        drawing.put(token_ids, drawn)
        return token_ids

    def _draw(self, scores: Tensor, drawing: BatchPart, batch: Composition, counters: Tensor) -> Tensor:
        """scores [m, V] -> [m]. They are left as they are: they may be the raw ones."""
        scaled = scores
        if Feature.TEMPERATURE in batch.parts:
            scaled = scores / drawing.number(Column.temperature)
        weights = scaled.softmax(-1)
        _filter(scaled, weights, batch)
        return blocks.inverse_cdf(weights, uniform(counters))

    def _record(self, token_ids: Tensor, batch: Composition) -> None:
        if (part := batch.parts.get(Feature.WATERMARK)) is not None:
            self._table.last_tokens.index_copy_(0, part.rows, part.take(token_ids))
        if (part := batch.parts.get(Feature.REPETITION)) is not None:
            self._history.record_seen(part.rows, part.take(token_ids))
        if (part := batch.parts.get(Feature.COUNTS)) is not None:
            self._history.record_counts(part.rows, part.take(token_ids))
        if Feature.NO_END_YET in batch.parts:
            self._table.count_down(batch.rows)


_REMEMBERING = (Feature.WATERMARK, Feature.REPETITION, Feature.COUNTS, Feature.NO_END_YET)
_ADJUSTING = frozenset({Feature.WATERMARK, Feature.BIAS, Feature.REPETITION, Feature.COUNTS, Feature.NO_END_YET})


def _filter(scores: Tensor, weights: Tensor, batch: Composition) -> None:
    """Sets the weights [m, V] of tokens that may not be drawn to 0."""
    parts = batch.parts
    if (part := parts.get(Feature.TOP_K)) is not None:
        with part.edit(weights) as lines:
            filters.top_k(part.take(scores), lines, part.number(Column.top_k).long(), batch.max_top_k)
    if (part := parts.get(Feature.TOP_P)) is not None:
        with part.edit(weights) as lines:
            filters.top_p(lines, part.number(Column.top_p))
    if (part := parts.get(Feature.TYPICAL_P)) is not None:
        with part.edit(weights) as lines:
            filters.typical_p(part.take(scores), lines, part.number(Column.typical_p))
    if (part := parts.get(Feature.MIN_P)) is not None:
        with part.edit(weights) as lines:
            filters.min_p(lines, part.number(Column.min_p))
