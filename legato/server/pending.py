"""A launched step: its tokens on their way to the host, and the response made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from legato.pb import generate_pb2 as pb
from legato.sampling.logprobs import LikeliestTokens, PromptScores
from legato.scheduling.state import NO_PROPOSAL

NOT_FINITE = "Numerical error: the model's logits for this request are not finite (NaN or infinity)"


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of one forward, on the device or on their way to the host."""

    rows: list[int]
    token_ids: torch.Tensor
    logprobs: torch.Tensor  # NaN where the logits of a row were not finite
    top: LikeliestTokens | None = None
    # Index -> why the token there is invalid.
    errors: dict[int, str] = field(default_factory=dict)
    # Of a step with drafts: how many tokens each row has got, one behind the other. Else empty: one each.
    counts: list[int] = field(default_factory=list)
    # [rows, count], what may follow the last token of each row, negative where there is no guess; None if nobody asked.
    proposals: torch.Tensor | None = None

    def per_row(self) -> list[list[int]]:
        """The tokens of each row, of a step with drafts: they are on the host."""
        token_ids, ends = self.token_ids.tolist(), accumulate(self.counts)
        return [token_ids[end - count : end] for end, count in zip(ends, self.counts, strict=True)]

    def to_host(self) -> SampledTokens:
        """Queue the copies behind the step. Wait for the step's event before reading them."""
        top = self.top
        if top is not None:
            top = replace(top, token_ids=_to_host(top.token_ids), logprobs=_to_host(top.logprobs))
        proposals = None if self.proposals is None else _to_host(self.proposals)
        return replace(
            self, token_ids=_to_host(self.token_ids), logprobs=_to_host(self.logprobs), top=top, proposals=proposals
        )


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The result of a forward. A step has one, or several in the order of its rows."""

    chosen: SampledTokens | None
    # Index of each sampled row, in the order of the request: a forward computes decodes first.
    order: list[int]
    # By row, for the rows that asked for the log probabilities of their prompt.
    prompt_scores: dict[int, list[PromptScores]]

    @property
    def counts(self) -> list[int]:
        """Tokens of each sampled row, in the order of the request."""
        counts = [] if self.chosen is None else self.chosen.counts
        return [counts[index] for index in self.order] if counts else [1] * len(self.order)

    @property
    def places(self) -> list[int]:
        """Where the sampled tokens are, in the order of the request."""
        if self.chosen is None or not self.chosen.counts:
            return self.order
        counts, ends = self.chosen.counts, list(accumulate(self.chosen.counts))
        return [place for index in self.order for place in range(ends[index] - counts[index], ends[index])]

    def to_host(self) -> ForwardResult:
        return self if self.chosen is None else replace(self, chosen=self.chosen.to_host())


@dataclass(frozen=True, slots=True)
class PendingStep:
    """`read` waits for the step."""

    step_id: int
    started: int
    clock: StepClock
    outcomes: list[ForwardResult]

    def read(self) -> pb.StepResponse:
        response = pb.StepResponse(id=self.step_id, forward_ns=self.clock.wait())
        for chosen, places in self._chosen():
            _read_tokens(chosen, places, response)
        if any(outcome.chosen is not None and outcome.chosen.counts for outcome in self.outcomes):
            response.num_sampled.extend(count for outcome in self.outcomes for count in outcome.counts)
        for outcome in self.outcomes:
            if outcome.chosen is not None and outcome.chosen.proposals is not None:
                proposals = outcome.chosen.proposals[outcome.order].flatten()
                response.proposed_ids.extend(torch.where(proposals < 0, NO_PROPOSAL, proposals).tolist())
        for row, pieces in self._prompt_scores().items():
            response.prompt_logprobs.add(
                row=row,
                logprobs=torch.cat([piece.logprobs for piece in pieces]).tolist(),
                top_ids=torch.cat([piece.top_ids for piece in pieces]).flatten().tolist(),
                top_logprobs=torch.cat([piece.top_logprobs for piece in pieces]).flatten().tolist(),
            )
        response.total_ns = time.perf_counter_ns() - self.started
        return response

    def _chosen(self) -> Iterator[tuple[SampledTokens, list[int]]]:
        for outcome in self.outcomes:
            if outcome.chosen is not None:
                yield outcome.chosen, outcome.places

    def _prompt_scores(self) -> dict[int, list[PromptScores]]:
        """By row: a prompt chunk may have been computed in several forwards."""
        scores: dict[int, list[PromptScores]] = {}
        for outcome in self.outcomes:
            for row, pieces in outcome.prompt_scores.items():
                scores.setdefault(row, []).extend(pieces)
        return scores


def _read_tokens(chosen: SampledTokens, places: list[int], response: pb.StepResponse) -> None:
    first = len(response.token_ids)
    index_of = {place: first + index for index, place in enumerate(places)}
    ids, logprobs = chosen.token_ids.tolist(), chosen.logprobs.tolist()
    response.token_ids.extend([ids[place] for place in places])
    response.logprobs.extend([logprobs[place] for place in places])
    errors = {place: NOT_FINITE for place in places if not math.isfinite(logprobs[place])} | chosen.errors
    for place, message in errors.items():
        response.row_errors.add(index=index_of[place], message=message)
    if (top := chosen.top) is not None:
        top_ids, top_logprobs = top.token_ids.tolist(), top.logprobs.tolist()
        for line, (place, length) in enumerate(zip(top.indices, top.lengths, strict=True)):
            response.top_tokens.add(
                index=index_of[place], ids=top_ids[line][:length], logprobs=top_logprobs[line][:length]
            )


class StepClock:
    """The device time of a step: CUDA events around it on a GPU, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events = [_timed_event() for _ in range(2)] if device.type == "cuda" else []
        self._started = time.perf_counter_ns()
        if self._events:
            self._events[0].record()
        self._duration = 0

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        self._duration = time.perf_counter_ns() - self._started

    def wait(self) -> int:
        """Nanoseconds, once everything queued before `stop` is done."""
        if not self._events:
            return self._duration
        self._events[1].synchronize()
        return int(self._events[0].elapsed_time(self._events[1]) * 1e6)


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
