"""Learns step times by rows and tokens, to decide how many drafts increase throughput.

A step with drafts takes longer for its tokens, and the next one waits for its result. Both are measured, not assumed:
on a device that reads its weights for every step a few tokens more cost nothing, at many rows they cost what rows cost.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

# The weight of a new measurement, and how far it may be from those before: a step may be held up by anything.
WEIGHT = 0.2
LARGEST_FACTOR = 2.0
# A guess is never quite sure.
HIGHEST_CHANCE = 0.98
# By how much drafts must be better than none.
MARGIN = 1.02
# Seconds from a result to the plan that it leads to, at most.
SAME_TURN = 0.02
# Tokens beyond twice the largest size measured that are tried as if they cost little.
MOST_TRIED = 8
# Numbers of rows that are near each other: one is less than so many times the other.
NEAR = 1.5
# Estimates that speak against drafts are made again, as nothing else would show that they are wrong: they fade by this
# much with each step that might have had some.
FADING = 0.998
FEW, FADING_OF_FEW = 8, 0.99


def bucket(count: int) -> int:
    """Sizes that are taken for the same: up to 15 exact, then within an eighth."""
    shift = max(0, count.bit_length() - 4)
    return -(-count >> shift) << shift


@dataclass(slots=True)
class Estimate:
    value: float = 0.0
    num_learned: int = 0

    @property
    def is_known(self) -> bool:
        return self.num_learned > 0

    def learn(self, seconds: float) -> None:
        self.num_learned += 1
        if self.num_learned == 1:
            self.value = seconds
            return
        seconds = min(seconds, self.value * LARGEST_FACTOR + 1e-3)
        self.value += WEIGHT * (seconds - self.value)

    def fade(self) -> None:
        self.value *= FADING if self.num_learned > FEW else FADING_OF_FEW


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step without prompts, when its result is here. Times in seconds."""

    num_rows: int
    num_tokens: int
    # The next step is planned when its result is here; and whether it was itself planned like that.
    is_waited_for: bool
    has_waited: bool
    # On the device, and from the result of the step before to its own.
    forward: float
    total: float
    # The shards guessed on behind what they sampled: that takes time, too.
    is_proposing: bool = False


class SizeTimes:
    """Seconds on the device by tokens, of steps that the next one waits for."""

    def __init__(self) -> None:
        self._by_size: dict[int, Estimate] = {}
        self.sizes: list[int] = []

    def learn(self, num_tokens: int, seconds: float) -> None:
        size = bucket(num_tokens)
        if size not in self._by_size:
            self._by_size[size] = Estimate()
            bisect.insort(self.sizes, size)
        self._by_size[size].learn(seconds)

    def between(self, first: int, last: int, num_rows: int, plain: float) -> list[float]:
        """Of steps with `first` to `last` tokens. Between sizes that were measured, in proportion. Up to twice the
        largest, with half of what a token has cost so far: it will be tried, and so the next time may be twice as many.
        `plain` is the time of a step without drafts."""
        found: list[float] = []
        sizes, by_size = self.sizes, self._by_size
        for place in range(bisect.bisect_left(sizes, first), len(sizes)):
            end, above = sizes[place], by_size[sizes[place]].value
            low = sizes[place - 1] if place else end
            slope = (above - by_size[low].value) / (end - low) if place else 0.0
            found += [above - slope * (end - num_tokens) for num_tokens in range(first, min(end, last) + 1)]
            first = end + 1
            if first > last:
                return found
        largest = sizes[-1] if sizes else num_rows
        seconds, tried = by_size[largest].value if sizes else plain, self.largest_tried(num_rows)
        slope = max(0.0, seconds - plain) / (2 * (largest - num_rows)) if largest > num_rows else 0.0
        return found + [
            (seconds + slope * (num_tokens - largest)) * max(1.0, num_tokens / tried)
            for num_tokens in range(first, last + 1)
        ]

    def largest_tried(self, num_rows: int) -> int:
        """Tokens up to which a step is tried as if it took hardly longer than the largest that was measured."""
        return 2 * (self.sizes[-1] if self.sizes else num_rows) + MOST_TRIED

    def fade(self) -> None:
        for estimate in self._by_size.values():
            estimate.fade()


@dataclass(slots=True)
class PlainTimes:
    """Of steps with so many rows and no drafts: seconds on the device, and what comes to that."""

    forward: Estimate = field(default_factory=Estimate)
    gap: Estimate = field(default_factory=Estimate)


@dataclass(slots=True)
class WaitedTimes:
    """Of steps that the next one waits for: seconds on the device, with and without proposals of the shards, and what
    comes to that."""

    drafting: SizeTimes = field(default_factory=SizeTimes)
    proposing: SizeTimes = field(default_factory=SizeTimes)
    gap: Estimate = field(default_factory=Estimate)

    def by_size(self, is_proposing: bool) -> SizeTimes:
        return self.proposing if is_proposing else self.drafting

    @property
    def is_known(self) -> bool:
        return bool(self.drafting.sizes or self.proposing.sizes)


@dataclass(frozen=True, slots=True)
class RowTimes:
    """What steps with so many rows take, with drafts and without."""

    num_rows: int
    plain: PlainTimes
    waited: WaitedTimes
    is_proposing: bool

    @property
    def plain_rate(self) -> float:
        """Tokens per second without drafts."""
        return self.num_rows / (self.plain.forward.value + self.plain.gap.value)

    @property
    def by_size(self) -> SizeTimes:
        return self.waited.by_size(self.is_proposing)

    def with_drafts(self, first: int, last: int) -> list[float]:
        """Seconds of steps with so many drafts."""
        gap, rows = max(self.waited.gap.value, self.plain.gap.value), self.num_rows
        seconds = self.by_size.between(rows + first, rows + last, rows, self.plain.forward.value)
        return [each + gap for each in seconds]

    def fade(self) -> None:
        self.by_size.fade()
        self.waited.gap.fade()


class StepCosts:
    """Knows no clock: its callers tell how long a step took.

    Steps with drafts are measured by their tokens, in classes of rows of which each has up to twice as many as the one
    before: when requests end one after the other, their number is a new one in every other step, and to try out at each
    what drafts cost would cost more than they bring.
    """

    def __init__(self) -> None:
        self._plain: dict[int, PlainTimes] = {}
        self._waited: dict[int, WaitedTimes] = {}

    def learn(self, step: MeasuredStep) -> None:
        if step.total <= 0:
            return
        plain = self._plain.setdefault(bucket(step.num_rows), PlainTimes())
        waited = self._waited.setdefault(_row_class(step.num_rows), WaitedTimes())
        # One that is longer than the step was something else, such as a process that did not get its turn.
        gap = min(max(step.total - step.forward, 0.0), step.forward)
        if step.has_waited:  # the step before is what it waited for: that is part of that one's price
            waited.gap.learn(gap)
        elif not step.is_waited_for:
            plain.gap.learn(gap)
        if step.is_waited_for:
            waited.by_size(step.is_proposing).learn(step.num_tokens, step.forward)
        else:
            plain.forward.learn(step.forward)

    def can_pay(self, num_rows: int, most: int, is_proposing: bool = False) -> bool:
        """Whether any number of drafts up to `most` would be worth their time if (nearly) all were right."""
        times = self._times(num_rows, is_proposing)
        if times is None:
            return not self._plain
        least, by_size = MARGIN * times.plain_rate, times.by_size
        # Between these, times are in proportion to tokens: none is better than both.
        counts = [1, most, *(size - num_rows for size in (*by_size.sizes, by_size.largest_tried(num_rows)))]
        for count in counts:
            if 0 < count <= most:
                rate = (num_rows + HIGHEST_CHANCE * count) / times.with_drafts(count, count)[0]
                if rate > least:
                    return True
        times.fade()
        return False

    def num_worth(self, num_rows: int, chances: Sequence[float], is_proposing: bool = False) -> int:
        """How many drafts to take, of such as are right with these chances, the best first."""
        times = self._times(num_rows, is_proposing)
        if times is None:
            return 0 if self._plain else len(chances)
        expected = accumulate(chances, initial=float(num_rows))
        next(expected)
        rates = [tokens / seconds for tokens, seconds in zip(expected, times.with_drafts(1, len(chances)), strict=True)]
        best = max(rates, default=0.0)
        if best > MARGIN * times.plain_rate:
            return rates.index(best) + 1
        times.fade()
        return 0

    def slowdown(self, num_rows: int, num_drafts: int, is_proposing: bool = False) -> float:
        """How many times as long as a step without drafts one with so many takes; 1 where none was measured."""
        times = self._times(num_rows, is_proposing)
        if times is None:
            return 1.0
        return times.with_drafts(num_drafts, num_drafts)[0] * times.plain_rate / num_rows

    def _times(self, num_rows: int, is_proposing: bool) -> RowTimes | None:
        """None where no step of about so many rows was measured. What only steps of more or fewer rows have shown is
        taken from those."""
        plain = self._plain.get(bucket(num_rows))
        if plain is None or not plain.forward.is_known:
            known = [size for size, times in self._plain.items() if times.forward.is_known]
            nearest = min(known, key=lambda size: abs(math.log(size / num_rows)), default=0)
            if not num_rows < NEAR * nearest < NEAR * NEAR * num_rows:
                return None
            plain = self._plain[nearest]
        number = _row_class(num_rows)
        classes = [self._waited[each] for each in (number, number + 1, number - 1) if each in self._waited]
        waited = next((each for each in classes if each.is_known), None)
        return RowTimes(num_rows, plain, waited or self._waited.setdefault(number, WaitedTimes()), is_proposing)


def _row_class(num_rows: int) -> int:
    """1, 2, up to 4, up to 8 and so on."""
    return (num_rows - 1).bit_length()


class StepPace:
    """How long each step takes that a scheduler plans: from the result of the step before it, if it was in flight by
    then or planned because of it, else from its plan."""

    def __init__(self) -> None:
        self._began: deque[float] = deque()
        self._last_end = -math.inf

    def begin(self, now: float) -> None:
        self._began.append(self._last_end if now - self._last_end < SAME_TURN else now)

    def end(self, now: float) -> float:
        began, self._last_end = self._began.popleft(), now
        if self._began:
            self._began[0] = now
        return now - began

    def clear(self) -> None:
        """Steps in flight never end."""
        self._began.clear()
