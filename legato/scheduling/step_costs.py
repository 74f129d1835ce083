"""How long steps take by their rows and tokens, and so how many drafts are worth their time.

A step with drafts takes longer for its tokens, and the next one waits for its result. Both are measured, not assumed:
on a device that reads its weights for every step a few tokens more cost nothing, at many rows they cost what rows cost.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# The weight of a new measurement, and how far it may be from those before: a step may be held up by anything.
WEIGHT = 0.2
LARGEST_FACTOR = 2.0
# A guess is never quite sure.
HIGHEST_CHANCE = 0.98
# By how much drafts must be better than none.
MARGIN = 1.02
# Seconds from a result to the plan that it leads to, at most.
SAME_TURN = 0.02
# Tokens beyond twice the largest size measured that are tried as if they cost nothing.
MOST_TRIED = 8
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

    def time(self, num_rows: int, num_tokens: int, plain: float) -> float:
        """Between sizes that were measured, in proportion. Up to twice the largest, as long as that: it will be tried,
        and so the next time may be twice as many. `plain` is the time of a step without drafts."""
        sizes = self.sizes
        place = bisect.bisect_left(sizes, num_tokens)
        if place == len(sizes):
            seconds = self._by_size[sizes[-1]].value if sizes else plain
            return seconds * max(1.0, num_tokens / self.largest_tried(num_rows))
        above = self._by_size[sizes[place]].value
        if place == 0 or sizes[place] == num_tokens:
            return above
        below, low = self._by_size[sizes[place - 1]].value, sizes[place - 1]
        return below + (above - below) * (num_tokens - low) / (sizes[place] - low)

    def largest_tried(self, num_rows: int) -> int:
        """Tokens up to which a step is tried as if it took no longer than the largest that was measured."""
        return 2 * (self.sizes[-1] if self.sizes else num_rows) + MOST_TRIED

    def fade(self) -> None:
        for estimate in self._by_size.values():
            estimate.fade()


@dataclass(slots=True)
class RowTimes:
    """Seconds of steps with so many rows: on the device, without drafts and where the next step waits for the result,
    there with and without proposals of the shards; and what comes to that without and with such waiting."""

    plain: Estimate = field(default_factory=Estimate)
    plain_gap: Estimate = field(default_factory=Estimate)
    waited: SizeTimes = field(default_factory=SizeTimes)
    proposing: SizeTimes = field(default_factory=SizeTimes)
    waited_gap: Estimate = field(default_factory=Estimate)

    def learn(self, step: MeasuredStep) -> None:
        # One that is longer than the step was something else, such as a process that did not get its turn.
        gap = min(max(step.total - step.forward, 0.0), step.forward)
        if step.has_waited:  # the step before is what it waited for: that is part of that one's price
            self.waited_gap.learn(gap)
        elif not step.is_waited_for:
            self.plain_gap.learn(gap)
        if step.is_waited_for:
            self.times(step.is_proposing).learn(step.num_tokens, step.forward)
        else:
            self.plain.learn(step.forward)

    def times(self, is_proposing: bool) -> SizeTimes:
        return self.proposing if is_proposing else self.waited

    @property
    def plain_time(self) -> float:
        return self.plain.value + self.plain_gap.value

    def waited_time(self, num_rows: int, num_tokens: int, is_proposing: bool) -> float:
        gap = max(self.waited_gap.value, self.plain_gap.value)
        return gap + self.times(is_proposing).time(num_rows, num_tokens, self.plain.value)

    def fade(self, is_proposing: bool) -> None:
        self.times(is_proposing).fade()
        self.waited_gap.fade()


class StepCosts:
    """Knows no clock: its callers tell how long a step took."""

    def __init__(self) -> None:
        self._by_rows: dict[int, RowTimes] = {}

    def learn(self, step: MeasuredStep) -> None:
        if step.total > 0:
            self._by_rows.setdefault(bucket(step.num_rows), RowTimes()).learn(step)

    def can_pay(self, num_rows: int, most: int, is_proposing: bool = False) -> bool:
        """Whether any number of drafts up to `most` would be worth their time if (nearly) all were right."""
        times = self._by_rows.get(bucket(num_rows))
        if times is None or not times.plain.is_known:
            return not self._by_rows
        least, by_size = MARGIN * num_rows / times.plain_time, times.times(is_proposing)
        # Between these, times are in proportion to tokens: none is better than both.
        counts = [1, most, *(size - num_rows for size in (*by_size.sizes, by_size.largest_tried(num_rows)))]
        for count in counts:
            if 0 < count <= most:
                rate = (num_rows + HIGHEST_CHANCE * count) / times.waited_time(num_rows, num_rows + count, is_proposing)
                if rate > least:
                    return True
        times.fade(is_proposing)
        return False

    def num_worth(self, num_rows: int, chances: Sequence[float], is_proposing: bool = False) -> int:
        """How many drafts to take, of such as are right with these chances, the best first."""
        times = self._by_rows.get(bucket(num_rows))
        if times is None or not times.plain.is_known:
            return 0 if self._by_rows else len(chances)
        best, most, expected = 0, MARGIN * num_rows / times.plain_time, float(num_rows)
        for count, chance in enumerate(chances, 1):
            expected += chance
            rate = expected / times.waited_time(num_rows, num_rows + count, is_proposing)
            if rate > most:
                best, most = count, rate
        if not best:
            times.fade(is_proposing)
        return best


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
