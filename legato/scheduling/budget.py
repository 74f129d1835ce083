"""How many prompt tokens a step may compute, so that running streams do not wait long for their next token.

A step is over when its longest part is, so a prompt beside decodes delays all of them. Without decodes a step may be
large, which computes prompts fastest; beside decodes it is small, and it shrinks further where steps take longer than
they should: on a slower device or with a larger model. A prompt token behind a long context costs more, because its
attention does, so the budget is counted in tokens without one.

If many more requests wait for their first token than there are to get their next one, small steps make all of them wait
longer, so a large backlog of prompts is computed in large steps (`--waiting-served-ratio`, as TGI pauses decodes then).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

# Below this, steps would be many and mostly overhead, and prompts would pay for it.
FEWEST_MIXED_TOKENS = 512
# A step that took far too long may be an accident, such as a kernel that was compiled or a graph that was captured
# before it: only the second in a row counts, and cuts no more than this. One that was fast may be an accident, too.
ACCIDENT = 1.5
LARGEST_CUT = 0.5
LARGEST_RISE = 1.1
# Matrix products of an H200 have tiles of 128 or 256 tokens, and take as long for a tile that is not full.
ALIGNMENT = 128
# The context at which the attention of a token takes as long as all else that is computed for it. By operations it is
# 27,000 tokens for Llama-3.1-8B and 52,000 for 70B; where it is wrong, learning from steps corrects the budget.
DOUBLING_CONTEXT = 24_000
# A backlog is large from so many full steps on, and stays so until one is left. 512 chats of 128 tokens that arrive at
# once are less: their streams keep getting tokens at the usual pace. It also stays so while this part of the ratio of
# waiting to running requests is left, or the last of many prompts would take the longest.
CATCH_UP_STEPS = 8
CATCH_UP_REST = 1 / 3


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Defaults for a kind of device."""

    max_tokens: int
    # Of prompts, beside decodes: what a server begins with, and what a fast one may learn to take.
    mixed_tokens: int
    # Seconds that a step with both should take. None: it takes what it takes.
    mixed_time: float | None = None
    # Requests that have a row at once; the others wait.
    max_rows: int = 128
    # Prompt tokens of any step (`--max-batch-prefill-tokens`), where that is less than `max_tokens`.
    max_prompt_tokens: int | None = None
    # None: `mixed_tokens`.
    most_mixed_tokens: int | None = None
    # Requests that wait for each one that decodes, from which on a large backlog is computed in full steps.
    waiting_served_ratio: float = math.inf

    @property
    def mixed_limit(self) -> int:
        return self.mixed_tokens if self.most_mixed_tokens is None else self.most_mixed_tokens

    def capped(self, tokens: int | None) -> StepSizes:
        """By `--max-batch-prefill-tokens`, if given."""
        if tokens is None:
            return self
        mixed, most = min(tokens, self.mixed_tokens), min(tokens, self.mixed_limit)
        return replace(self, max_tokens=tokens, mixed_tokens=mixed, max_prompt_tokens=tokens, most_mixed_tokens=most)


# Two cores compute about 700 prompt tokens a second, so a step of 256 holds the others up for a third of one. One
# H200 computes 44,000 with an 8B model: 8,192 take 190 ms, and 1,500 beside 512 decodes the 50 ms aimed at. In fp8 it
# computes 72,000.
STEP_SIZES = {
    "cpu": StepSizes(512, 256),
    "cuda": StepSizes(8192, 2048, 0.050, max_rows=512, most_mixed_tokens=4096),
}


def step_sizes(device_type: str, given: int | None) -> StepSizes:
    return STEP_SIZES.get(device_type, STEP_SIZES["cpu"]).capped(given)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests without a first token, queued or running, and what their prompts still take, in tokens."""

    num_requests: int
    work: int

    @staticmethod
    def of(wanted: Iterable[int], num_queued: int, queued_work: int) -> Backlog:
        """`wanted`: the tokens that each running request lacks; those with one have their prompt behind them."""
        prompts = [count for count in wanted if count > 1]
        return Backlog(num_queued + len(prompts), queued_work + sum(prompts))


@dataclass(slots=True)
class PromptRoom:
    """The part of a step's budget that is left for prompt tokens, given the number of tokens before them."""

    tokens: int
    # In tokens without a context; None: only `tokens` counts.
    units: float | None = None
    # The first prompt may have so many, whatever its context.
    fewest: int = 0
    # Decodes and prompt tokens that the step has so far, and the units that the latter came to.
    num_before: int = 0
    num_units: float = 0.0
    # Whether the time of the step says something about those that the budget has a limit for.
    is_typical: bool = True

    @property
    def learnable_units(self) -> float:
        return self.num_units if self.is_typical else 0.0

    @property
    def is_left(self) -> bool:
        return self.tokens > 0 and (self.units is None or self.units >= 1)

    def offer(self, wanted: int, context_len: int) -> int:
        """How many of a prompt's tokens the step has room for. A prompt that does not fit is cut where the step has a
        multiple of `ALIGNMENT` tokens, be it a little more than fits: cut off always, the budget would never rise."""
        most = self.tokens
        if self.units is not None:
            fitting = int(self.units / _weight(context_len))
            most = min(most, fitting if self.num_units else max(fitting, self.fewest))
        if wanted <= most or self.units is None or most < 2 * ALIGNMENT:
            return min(wanted, most)
        beyond = (self.num_before + most) % ALIGNMENT
        aligned = most - beyond + (ALIGNMENT if 2 * beyond >= ALIGNMENT else 0)
        return aligned if aligned <= min(wanted, self.tokens) else most - beyond

    def spend(self, count: int, wanted: int, context_len: int) -> None:
        """On a prompt that wanted so many. One that was cut is the last of its step."""
        units = count * _weight(context_len)
        self.num_before += count
        self.num_units += units
        self.tokens = self.tokens - count if count == wanted else 0
        if self.units is not None:
            self.units = max(self.units - units, 0.0)


class StepBudget:
    """Learns from every step that had both, and from nothing else: no clock, so a test can replay it."""

    def __init__(self, sizes: StepSizes) -> None:
        self._sizes = sizes
        self._fewest = min(FEWEST_MIXED_TOKENS, sizes.mixed_tokens)
        self._mixed: float = sizes.mixed_tokens  # in tokens without a context
        self._was_slow = False
        self._is_catching_up = False

    def room(self, num_decodes: int, backlog: Backlog | None = None) -> PromptRoom:
        """For prompts in a step in which `num_decodes` rows get a token each, or bring so many drafts with it. No
        `backlog`: nobody may be kept waiting because of it."""
        tokens = self._sizes.max_tokens - num_decodes
        if self._sizes.max_prompt_tokens is not None:
            tokens = min(tokens, self._sizes.max_prompt_tokens)
        if not num_decodes:
            return PromptRoom(tokens)
        if self._sizes.mixed_time is None:
            return PromptRoom(min(tokens, int(self._mixed)))
        self._is_catching_up = backlog is not None and self._is_large(backlog, num_decodes)
        if self._is_catching_up:
            return PromptRoom(tokens, tokens, self._fewest, num_decodes, is_typical=False)
        return PromptRoom(min(tokens, self._sizes.mixed_limit), self._mixed, self._fewest, num_decodes)

    def _is_large(self, backlog: Backlog, num_decodes: int) -> bool:
        ratio, num_steps = self._sizes.waiting_served_ratio, CATCH_UP_STEPS
        if self._is_catching_up:
            ratio, num_steps = CATCH_UP_REST * ratio, 1
        return backlog.num_requests >= ratio * num_decodes and backlog.work > num_steps * self._sizes.max_tokens

    def learn(self, num_units: float, seconds: float) -> None:
        """That so much took so long beside decodes. A step that was not full says nothing against a larger one."""
        target = self._sizes.mixed_time
        if target is None or seconds <= 0:
            return
        # Of the step itself and not of today's budget: two steps of the same size must not be answered for twice.
        fitting = num_units * target / seconds
        if seconds <= target:
            self._mixed = min(max(self._mixed, fitting), self._mixed * LARGEST_RISE, self._sizes.mixed_limit)
        elif self._was_slow or seconds < ACCIDENT * target:
            self._mixed = max(min(self._mixed, fitting), self._mixed * LARGEST_CUT, self._fewest)
        self._was_slow = seconds >= ACCIDENT * target


def _weight(context_len: int) -> float:
    """What a token costs behind so many, relative to one without a context."""
    return 1 + context_len / DOUBLING_CONTEXT
