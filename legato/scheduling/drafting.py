"""Which drafts a step verifies: guesses from texts that are there, as many as are worth their time.

How likely a guess is right is learned from all guesses, whether they are drafted or not: every token of a request shows
whether the match that it followed had it right. So nothing is tried out to learn that, and a text without
repetition costs the few microseconds in which it is looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from legato.scheduling.entry import Entry
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.state import StepPlan, StepResult
from legato.scheduling.step_times import StepPace, StepTimes
from legato.scheduling.suffix_index import TenantAnswers, TextMatch

# Rows of a step beyond which no drafts are looked for: the scheduler has enough to do, and so has the device.
MOST_ROWS = 128
# Tokens that a request may be ahead of its index and still be read one by one.
MOST_UNREAD = 256
# Matches of this length and more are alike.
LONGEST = 16
# A guess is never quite sure, and what happened long ago counts less.
HIGHEST_CHANCE = 0.98
LOWEST_CHANCE = 0.02
MEMORY = 512.0
# Of a request's own guesses: the last ten or so count.
FORGETTING = 0.9


@dataclass(slots=True)
class RequestDrafts:
    """Of one request: what it follows, and how many of its guesses were right against how many were expected to be."""

    text: TextMatch
    num_right: float = 4.0
    num_expected: float = 4.0

    @property
    def factor(self) -> float:
        return self.num_right / self.num_expected


class Chances:
    """That a guess is right, by the length of its match."""

    def __init__(self) -> None:
        # As if some had been seen: two in ten at the shortest match, nine in ten at the longest.
        self._all = [10.0] * (LONGEST + 1)
        self._right = [2.0 + 7.0 * length / LONGEST for length in range(LONGEST + 1)]

    def __getitem__(self, length: int) -> float:
        place = min(length, LONGEST)
        return self._right[place] / self._all[place]

    def learn(self, length: int, was_right: bool) -> None:
        place = min(length, LONGEST)
        self._all[place] += 1
        self._right[place] += was_right
        if self._all[place] > MEMORY:
            self._all[place] /= 2
            self._right[place] /= 2


class Drafter:
    """Belongs to the scheduler, and outlives shards: what it knows is tokens."""

    def __init__(self) -> None:
        self.pace = StepPace()
        self._times = StepTimes()
        self._chances = Chances()
        self._answers = TenantAnswers()

    def remember(self, entry: Entry) -> None:
        """A request has ended: later ones of its tenant may say the same."""
        entry.drafts = None
        self._answers.add(entry.request.tenant, entry.tokens[entry.num_prompt :])

    def learn(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """How long a step took whose result has come."""
        seconds, num_tokens = self.pace.end(now), sum(plan.num_tokens)
        if not plan.admitted and num_tokens == len(plan.rows) + sum(map(len, plan.drafts.values())):
            self._times.learn(len(plan.rows), num_tokens, result.forward_ns / 1e9, seconds)

    def choose(self, running: Sequence[Entry], limits: SchedulerLimits, num_spare: int) -> dict[int, list[int]]:
        """Drafts by request, for a step in which all that run decode. They follow the tokens that are known and those
        that steps in flight will sample. `num_spare` blocks may be taken for them: nobody gives up a block."""
        entries = [entry for entry in running if entry.num_to_compute]
        room = limits.max_sampled - len(entries)
        if len(entries) > MOST_ROWS or room <= 0:
            return {}
        guesses: dict[int, list[int]] = {}
        ranked: list[tuple[float, int]] = []
        for entry in entries:
            limit = min(limits.speculate, entry.max_len - entry.num_known - 1)
            if limit > 0 and (drafts := self._read(entry)).text.length:
                found, chances = self._guess(entry, drafts, limit, limits.vocab_size)
                guesses[entry.id] = found
                ranked += [(chance, entry.id) for chance in chances]
        if not ranked:
            return {}
        ranked.sort(reverse=True)
        count = self._times.num_worth(len(entries), [chance for chance, _ in ranked[:room]])
        counts = Counter(request_id for _, request_id in ranked[:count])
        return _fitting(
            {entry: guesses[entry.id][: counts[entry.id]] for entry in entries if counts[entry.id]},
            limits.block_size,
            num_spare,
        )

    def _read(self, entry: Entry) -> RequestDrafts:
        """Look at the tokens that have come since the last time."""
        drafts = entry.drafts
        if drafts is None or drafts.text.unread() > MOST_UNREAD:
            text = TextMatch(entry.tokens, len(entry.tokens), self._answers.of(entry.request.tenant))
            drafts = entry.drafts = RequestDrafts(text)
        text = drafts.text
        for _ in range(text.unread()):
            length = text.length
            was_right = text.read()
            if was_right is not None:
                drafts.num_right = FORGETTING * drafts.num_right + was_right
                drafts.num_expected = FORGETTING * drafts.num_expected + self._chances[length]
                self._chances.learn(length, was_right)
        return drafts

    def _guess(self, entry: Entry, drafts: RequestDrafts, limit: int, vocab_size: int) -> tuple[list[int], list[float]]:
        """Drafts, and the chance of each that it and all before it are right."""
        text, factor, pending = drafts.text, drafts.factor, entry.num_pending
        guesses = text.guess(pending + limit)
        chance, chances = 1.0, []
        for place, token in enumerate(guesses):
            if not 0 <= token < vocab_size or token in entry.end_ids:
                break
            chance *= min(self._chances[text.length + place] * factor, HIGHEST_CHANCE)
            if chance < LOWEST_CHANCE:
                break
            chances.append(chance)
        return guesses[pending : len(chances)], chances[pending:]


def _fitting(chosen: dict[Entry, list[int]], block_size: int, num_spare: int) -> dict[int, list[int]]:
    """Those that have room in their request's blocks, or in spare ones."""
    fitting = {}
    for entry, drafts in chosen.items():
        room = entry.capacity - entry.num_scheduled - 1
        missing = max(0, -(-(len(drafts) - room) // block_size))
        if missing > num_spare:
            drafts = drafts[: max(room, 0)]
        else:
            num_spare -= missing
        if drafts:
            fitting[entry.id] = drafts
    return fitting
