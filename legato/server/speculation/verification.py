"""Verifies the draft tokens of a step against the sampled tokens.

A row with k drafts has logits at k + 1 positions. They are sampled in order, each only if the draft before it was what
was sampled there: so what is sampled, and everything that sampling remembers of a row, is what it would be without
drafts. Where sampling remembers nothing but the position, all positions are sampled at once, with the same result. The
host must know a token before it decides about the next, which costs nothing: the router sends no other step before it
has the result of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import torch

from legato.sampling.logprobs import LikeliestTokens
from legato.server.pending import SampledTokens
from legato.server.rows import RowStep

# Samples one token for each of these rows, from these lines of the logits.
Sample: TypeAlias = Callable[[torch.Tensor, list[int]], SampledTokens]
# Tells a grammar which tokens these rows have got.
Accept: TypeAlias = Callable[[list[int], list[int]], None]


@dataclass(slots=True)
class _SampledPart:
    """The tokens of one row so far: parallel lists, and the most likely tokens if requested."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def verify(logits: torch.Tensor, parts: Sequence[RowStep], sample: Sample, accept: Accept) -> SampledTokens:
    """`parts` are those that sample, and logits [sum of their `num_sampled`, V] those of all their positions."""
    firsts = _firsts(parts)
    found = [_SampledPart() for _ in parts]
    going, depth = list(range(len(parts))), 0
    while going:
        rows = [parts[i].row for i in going]
        lines = torch.tensor([firsts[i] + depth for i in going]).to(logits.device, non_blocking=True)
        sampled = sample(logits.index_select(0, lines), rows)
        ids = sampled.token_ids.tolist()
        for i, token, logprob in zip(going, ids, sampled.logprobs.tolist(), strict=True):
            found[i].token_ids.append(token)
            found[i].logprobs.append(logprob)
        for place, top in _top_tokens(sampled.top):
            found[going[place]].top[depth] = top
        for place, error in sampled.errors.items():
            found[going[place]].errors[depth] = error
        accept(rows, ids)
        going = [i for i, token in zip(going, ids, strict=True) if token in parts[i].draft_ids[depth : depth + 1]]
        going = [i for i in going if depth not in found[i].errors]
        depth += 1
    return _joined(found)


def verify_at_once(chosen: SampledTokens, parts: Sequence[RowStep]) -> SampledTokens:
    """The same for rows whose choice at a position does not depend on the tokens before it, but through the logits:
    `chosen` has what they choose at all positions."""
    ids = chosen.token_ids.tolist()
    counts: list[int] = []
    places: list[int] = []
    for part, first in zip(parts, _firsts(parts), strict=True):
        drafts, count = part.draft_ids, 1
        while count <= len(drafts) and drafts[count - 1] == ids[first + count - 1]:
            count += 1
        counts.append(count)
        places.extend(range(first, first + count))
    tops = None
    if chosen.top is not None:
        by_place = dict(_top_tokens(chosen.top))
        tops = {number: by_place[place] for number, place in enumerate(places) if place in by_place}
    chosen_ids = torch.tensor([ids[place] for place in places])
    logprobs = chosen.logprobs.cpu()[places]
    return SampledTokens([], chosen_ids, logprobs, _likeliest(tops) if tops else None, counts=counts)


def _firsts(parts: Sequence[RowStep]) -> list[int]:
    return [0, *accumulate(part.num_sampled for part in parts)][:-1]


def _top_tokens(top: LikeliestTokens | None) -> Iterator[tuple[int, tuple[list[int], list[float]]]]:
    if top is not None:
        ids, logprobs = top.token_ids.tolist(), top.logprobs.tolist()
        for line, (place, length) in enumerate(zip(top.indices, top.lengths, strict=True)):
            yield place, (ids[line][:length], logprobs[line][:length])


def _joined(found: list[_SampledPart]) -> SampledTokens:
    """Of no rows: what they remember is up to date already, and no grammar waits for these tokens."""
    counts = [len(part.token_ids) for part in found]
    firsts = [0, *accumulate(counts)]
    tops = {first + depth: top for first, part in zip(firsts, found, strict=False) for depth, top in part.top.items()}
    errors = {first + depth: e for first, part in zip(firsts, found, strict=False) for depth, e in part.errors.items()}
    return SampledTokens(
        [],
        torch.tensor([token for part in found for token in part.token_ids]),
        torch.tensor([logprob for part in found for logprob in part.logprobs]),
        _likeliest(tops) if tops else None,
        errors,
        counts,
    )


def _likeliest(tops: dict[int, tuple[list[int], list[float]]]) -> LikeliestTokens:
    lengths = [len(ids) for ids, _ in tops.values()]
    longest = max(lengths)
    return LikeliestTokens(
        list(tops),
        lengths,
        torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in tops.values()]),
        torch.tensor([logprobs + [0.0] * (longest - len(logprobs)) for _, logprobs in tops.values()]),
    )
