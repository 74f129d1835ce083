"""How many prompt tokens a step may compute, so that running streams do not wait long for their next token.

A step is over when its longest part is, so a prompt beside decodes delays all of them. Without decodes a step may be
large, which computes prompts fastest; beside decodes it is small, and it shrinks further where steps take longer than
they should: on a slower device or with a larger model. A prompt token behind a long context costs more, because its
attention does, so the budget is counted in tokens without one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Below this, steps would be many and mostly overhead, and prompts would pay for it.
FEWEST_MIXED_TOKENS = 512
# A step that took far too long may be an accident, such as a kernel that was compiled; so may one that was fast.
LARGEST_CUT = 0.5
LARGEST_RISE = 1.1
# The context at which the attention of a token takes as long as all else that is computed for it. By operations it is
# 27,000 tokens for Llama-3.1-8B and 52,000 for 70B; where it is wrong, learning from steps corrects the budget.
DOUBLING_CONTEXT = 24_000


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


class StepBudget:
    """Learns from every step that had both, and from nothing else: no clock, so a test can replay it."""

    def __init__(self, sizes: StepSizes) -> None:
        self._sizes = sizes
        self._fewest = min(FEWEST_MIXED_TOKENS, sizes.mixed_tokens)
        self._mixed: float = sizes.mixed_tokens  # in tokens without a context

    def prompt_tokens(self, num_decodes: int, context_len: int = 0) -> int:
        """For a step in which `num_decodes` rows get a token each, and whose first prompt goes on behind `context_len`
        tokens."""
        room = self._sizes.max_tokens - num_decodes
        if self._sizes.max_prompt_tokens is not None:
            room = min(room, self._sizes.max_prompt_tokens)
        if not num_decodes:
            return room
        if self._sizes.mixed_time is None:
            return min(room, int(self._mixed))
        return min(room, max(int(self._mixed / _weight(context_len)), self._fewest))

    def learn(self, num_prompt_tokens: int, seconds: float, context_len: int = 0) -> None:
        """That so many took so long beside decodes. A step that was not full says nothing against a larger one."""
        target = self._sizes.mixed_time
        if target is None or seconds <= 0:
            return
        # Of the step itself and not of today's budget: two steps of the same size must not be answered for twice.
        fitting = num_prompt_tokens * _weight(context_len) * target / seconds
        if seconds > target:
            self._mixed = max(min(self._mixed, fitting), self._mixed * LARGEST_CUT, self._fewest)
        else:
            self._mixed = min(max(self._mixed, fitting), self._mixed * LARGEST_RISE, self._sizes.mixed_limit)


def _weight(context_len: int) -> float:
    """What a token costs behind so many, relative to one without a context."""
    return 1 + context_len / DOUBLING_CONTEXT
