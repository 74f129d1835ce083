"""Chooses the draft tokens of a step: guesses from earlier text, as many as increase throughput.

How likely a guess is right is learned from all guesses, whether they are drafted or not: every token of a request shows
whether the match that it followed had it right. So nothing is tried out to learn that, and a text without
repetition costs the few microseconds in which it is looked up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, takewhile
from operator import mul, neg

from legato.scheduling.entry import Entry, InFlight
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.state import NO_PROPOSAL, StepPlan, StepResult
from legato.scheduling.step_costs import HIGHEST_CHANCE, WEIGHT, MeasuredStep, StepCosts, StepPace
from legato.scheduling.suffix_index import TenantAnswers, TextMatch

# Rows of a step beyond which no drafts are looked for: the scheduler has enough to do, and so has the device.
MOST_ROWS = 128
# Share of the time of steps that the device computes, below which no drafts are looked for: it is the router that
# cannot keep up, and drafts would save the time of the device.
LEAST_BUSY = 0.2
# Tokens of texts that one plan indexes, in a millisecond or two, and what the shortest counts for. The others wait for
# the next plan; one text is always indexed.
MOST_NEW_TOKENS, FEWEST_NEW_TOKENS = 16_384, 1024
# Tokens that a request may be ahead of its index and still be read one by one.
MOST_UNREAD = 256
# Tokens of an answer that are indexed as they come: a hundred bytes each. Then they are sorted, as those of the prompt.
MOST_OWN_TOKENS = 4096
# A request without a match for so many tokens is not looked at in every step: its text is read some tokens at a time.
PATIENCE, TOKENS_AT_ONCE = 24, 8
# Matches of this length and more are alike.
LONGEST = 16
# What happened long ago counts less.
LOWEST_CHANCE = 0.02
MEMORY = 512.0
# Tokens that a grammar forces of which a shard tells, and after how many others it is asked again.
MOST_FORCED = 8
ASKED_AGAIN = 32
# Share of its tokens a second that a tenant may lose to the drafts of others.
MOST_LOST = 0.05
# Of a request's own guesses: the last ten or so count.
FORGETTING = 0.9


@dataclass(slots=True)
class RequestDrafts:
    """Of one request: what it follows, and how many of its guesses were right against how many were expected to be."""

    # None: it is not indexed yet.
    text: TextMatch | None = None
    num_right: float = 4.0
    num_expected: float = 4.0
    # Tokens in a row before which there was no match.
    num_unmatched: int = 0
    # What the shards guess, from token `proposed_at` of its text on.
    proposed_ids: list[int] = field(default_factory=list)
    proposed_at: int = 0
    # How many of them are known to be right.
    num_judged: int = 0
    # How often a shard had guesses when it was asked.
    proposal_share: float = 1.0
    # How long its text was when they were asked last.
    asked_at: int = 0

    # How long the text will be when it is read again.
    read_at: int = 0

    @property
    def is_idle(self) -> bool:
        return self.num_unmatched >= PATIENCE and not self.proposed_ids

    @property
    def is_to_index(self) -> bool:
        """Its text, or so much of it that this is faster or smaller."""
        text = self.text
        return text is None or text.unread() > MOST_UNREAD or text.num_own > MOST_OWN_TOKENS

    @property
    def match_length(self) -> int:
        return 0 if self.text is None else self.text.length

    @property
    def factor(self) -> float:
        return self.num_right / self.num_expected


class Chances:
    """That a guess is right, by the length of its match or by its distance from what is known."""

    def __init__(self, first: float, last: float) -> None:
        """What is assumed at the shortest and at the longest, as if ten had been seen of each."""
        self._shares = [first + (last - first) * number / LONGEST for number in range(LONGEST + 1)]
        self._all = [10.0] * (LONGEST + 1)
        self._right = [10 * share for share in self._shares]

    def __getitem__(self, number: int) -> float:
        return self._shares[number if number < LONGEST else LONGEST]

    def following(self, number: int, count: int) -> list[float]:
        """Of `number` and those behind it."""
        return self._shares[number : number + count] + self._shares[-1:] * (
            number + count - 1 - max(number - 1, LONGEST)
        )

    def learn(self, number: int, was_right: bool) -> None:
        place = min(number, LONGEST)
        self._all[place] += 1
        self._right[place] += was_right
        if self._all[place] > MEMORY:
            self._all[place] /= 2
            self._right[place] /= 2
        self._shares[place] = self._right[place] / self._all[place]


class Drafter:
    """Belongs to the scheduler, and outlives shards: what it knows is tokens."""

    def __init__(self) -> None:
        self.pace = StepPace()
        self._is_waiting = False  # the last step whose result has come was one that the next had waited for
        self._times = StepCosts()
        self._busy = 1.0  # share of the time in which the device computes
        self._chances = Chances(0.2, 0.9)  # of matches, by their length
        self._proposals = Chances(0.6, 0.6)  # of what the shards guess, by its distance
        self._answers = TenantAnswers()

    @property
    def is_worthwhile(self) -> bool:
        """Whether drafts may save time at all."""
        return self._busy >= LEAST_BUSY

    def remember(self, entry: Entry) -> None:
        """A request has ended: later ones of its tenant may say the same."""
        entry.drafts = None
        self._answers.add(entry.request.tenant, entry.tokens[entry.num_prompt :])

    def learn(self, plan: StepPlan, forward: float, now: float) -> None:
        """How long a step took whose result has come; `forward` on the device."""
        seconds = self.pace.end(now)
        has_waited, self._is_waiting = self._is_waiting, plan.is_waited_for
        if seconds > 0:
            self._busy += WEIGHT * (min(forward / seconds, 1.0) - self._busy)
        if not self.is_worthwhile or len(plan.rows) > MOST_ROWS or plan.admitted or plan.is_catching_up:
            return
        num_tokens = sum(plan.num_tokens)
        if num_tokens == len(plan.rows) + sum(map(len, plan.drafts.values())):
            self._times.learn(
                MeasuredStep(
                    len(plan.rows),
                    num_tokens,
                    plan.is_waited_for,
                    has_waited,
                    min(forward, seconds) or seconds,
                    seconds,
                    plan.num_proposals > 0,
                )
            )

    def take_proposals(self, step: InFlight, result: StepResult) -> None:
        """The guesses of the shards, which follow what the result has brought."""
        count, first = step.plan.num_proposals, 0
        if not count:
            return
        for entry, _, _, samples in step.planned:
            if samples and not entry.done:
                found = result.proposed_ids[first : first + count]
                known = list(takewhile(lambda token: token != NO_PROPOSAL, found))  # a shard may have none for a row
                drafts = self._of(entry)
                self._judge_proposals(entry, drafts)
                drafts.proposed_ids, drafts.proposed_at, drafts.num_judged = known, len(entry.tokens), 0
                drafts.read_at = 0
                drafts.proposal_share += (1 - FORGETTING) * (bool(known) - drafts.proposal_share)
            first += count if samples else 0

    def draft(
        self, plan: StepPlan, running: Sequence[Entry], limits: SchedulerLimits, num_spare: int
    ) -> dict[int, list[int]]:
        """Drafts by request, for a step in which all that run decode. They follow the tokens that are known and those
        that steps in flight will sample. `num_spare` blocks may be taken for them: nobody gives up a block."""
        entries = [entry for entry in running if entry.num_to_compute]
        room = limits.max_sampled - len(entries)
        if not 0 < len(entries) <= MOST_ROWS or room <= 0:
            return {}
        most = min(room, limits.speculate * len(entries))
        chosen: dict[int, list[int]] = {}
        if self._times.can_pay(len(entries), most):
            chosen = self._choose(entries, limits, room, num_spare)
        if limits.num_proposals:
            plan.num_proposals = self._num_proposals(entries, limits, room)
            plan.is_catching_up = plan.num_proposals > 0 and self._note_asked(entries, limits)
        elif any(entry.request.has_grammar for entry in entries):
            plan.num_proposals = self._num_forced(entries, limits, room)
        return chosen

    def _note_asked(self, entries: Sequence[Entry], limits: SchedulerLimits) -> bool:
        """Shards are asked for guesses at these. Whether that is new to them for some."""
        is_new = False
        for entry in entries:
            drafts = self._of(entry)
            is_new = is_new or entry.num_known - drafts.asked_at > 2 * (limits.speculate + 1)
            drafts.asked_at = entry.num_known
        return is_new

    def _num_forced(self, entries: Sequence[Entry], limits: SchedulerLimits, room: int) -> int:
        """How many tokens to ask the shards for that grammars force. Most grammars force some in some places, so a
        request is asked for again now and then when there was nothing for a while."""
        most = min(limits.speculate, MOST_FORCED)
        shares = {
            entry: 1.0 if entry.drafts is None or not entry.num_generated % ASKED_AGAIN else entry.drafts.proposal_share
            for entry in entries
            if entry.request.has_grammar
        }
        each = self._proposal_chances(most)
        chances = sorted((share * chance for share in shares.values() for chance in each), reverse=True)[:room]
        if not self._times.num_worth(len(entries), chances, is_proposing=True):
            return 0
        gains = {entry: share * sum(each) for entry, share in shares.items()}
        return most if self._is_fair(entries, gains, len(chances), is_proposing=True) else 0

    def _num_proposals(self, entries: Sequence[Entry], limits: SchedulerLimits, room: int) -> int:
        """How many guesses to ask the shards for: none where texts that are there say more."""
        most = min(limits.num_proposals, limits.speculate)
        each = self._proposal_chances(most)
        if all(entry.drafts is not None and self._follows_text(entry.drafts) for entry in entries):
            return 0
        chances = [chance for chance in each for _ in entries]
        return most if self._times.num_worth(len(entries), chances[:room], is_proposing=True) else 0

    def _follows_text(self, drafts: RequestDrafts) -> bool:
        """Whether its match is likelier to be right than what the shards guess."""
        length = drafts.match_length
        return length > 0 and self._proposals[0] <= self._chances[length] * drafts.factor

    def _choose(
        self, entries: Sequence[Entry], limits: SchedulerLimits, room: int, num_spare: int
    ) -> dict[int, list[int]]:
        guesses: list[tuple[Entry, list[int], list[float]]] = []
        num_new = 0  # tokens
        for entry in entries:
            known = entry.drafts
            if known is not None and len(entry.tokens) < known.read_at:
                continue
            drafts = self._of(entry)
            if drafts.is_to_index:
                is_first, num_new = not num_new, num_new + max(len(entry.tokens), FEWEST_NEW_TOKENS)
                if num_new > MOST_NEW_TOKENS and not is_first:
                    continue
                num_new += self._index(entry, drafts)
            self._read(entry, drafts)
            if not (drafts.match_length or drafts.proposed_ids):
                continue
            limit = min(limits.speculate, entry.max_len - entry.num_known - 1)
            if limit > 0:
                guesses.append((entry, *self._guess(entry, drafts, limit, limits.vocab_size)))
        ranked = sorted(chain.from_iterable(chances for _, _, chances in guesses), reverse=True)[:room]
        count = self._times.num_worth(len(entries), ranked) if ranked else 0
        if not count:
            return {}
        chosen = _likeliest(guesses, ranked[count - 1], count)
        gains = {entry: sum(chances[: len(chosen.get(entry, ()))]) for entry, _, chances in guesses}
        if not self._is_fair(entries, gains, count):
            return {}
        return _fitting(chosen, limits.block_size, num_spare)

    def _is_fair(
        self, entries: Sequence[Entry], gains: Mapping[Entry, float], num_drafts: int, *, is_proposing: bool = False
    ) -> bool:
        """Whether the streams of no tenant get slower, whoever has the drafts that make the step longer. `gains` are
        tokens that drafts are expected to bring."""
        num_rows, expected = defaultdict[str, int](int), defaultdict[str, float](float)
        for entry in entries:
            tenant = entry.request.tenant
            num_rows[tenant] += 1
            expected[tenant] += 1 + gains.get(entry, 0.0)
        if len(num_rows) == 1:
            return True
        least = (1 - MOST_LOST) * self._times.slowdown(len(entries), num_drafts, is_proposing)
        return all(expected[tenant] >= least * number for tenant, number in num_rows.items())

    def _of(self, entry: Entry) -> RequestDrafts:
        if entry.drafts is None:
            entry.drafts = RequestDrafts()
        return entry.drafts

    def _index(self, entry: Entry, drafts: RequestDrafts) -> int:
        """Returns for how many tokens of prompts the other texts count that had to be indexed for this one."""
        answers, num_indexed = self._answers.of(entry.request.tenant)
        drafts.text = TextMatch(entry.tokens, len(entry.tokens), answers)
        drafts.num_unmatched = 0
        return num_indexed

    def _read(self, entry: Entry, drafts: RequestDrafts) -> None:
        """Look at the tokens that have come since the last time."""
        self._judge_proposals(entry, drafts)
        text = drafts.text
        if text is None:
            return
        if drafts.is_idle:
            text.skip()
        for _ in range(text.unread()):
            length = text.length
            was_right = text.read()
            drafts.num_unmatched = 0 if text.length else drafts.num_unmatched + 1
            if was_right is not None:
                drafts.num_right = FORGETTING * drafts.num_right + was_right
                drafts.num_expected = FORGETTING * drafts.num_expected + self._chances[length]
                self._chances.learn(length, was_right)
        drafts.read_at = len(entry.tokens) + TOKENS_AT_ONCE if drafts.is_idle else 0

    def _judge_proposals(self, entry: Entry, drafts: RequestDrafts) -> None:
        """Was what the shards guessed right? Where it was not, neither is what they guessed behind it."""
        while drafts.proposed_ids and drafts.proposed_at + drafts.num_judged < len(entry.tokens):
            depth = drafts.num_judged
            was_right = entry.tokens[drafts.proposed_at + depth] == drafts.proposed_ids[depth]
            self._proposals.learn(depth, was_right)
            drafts.num_judged += 1
            if not was_right or drafts.num_judged == len(drafts.proposed_ids):
                drafts.proposed_ids = []

    def _proposal_chances(self, count: int) -> list[float]:
        return list(accumulate((self._proposals[depth] for depth in range(count)), mul))

    def _guess(self, entry: Entry, drafts: RequestDrafts, limit: int, vocab_size: int) -> tuple[list[int], list[float]]:
        """Drafts, and the chance of each that it and all before it are right."""
        text, factor, pending = drafts.text, drafts.factor, entry.num_pending
        proposed = drafts.proposed_ids[:limit] if not pending and drafts.proposed_at == len(entry.tokens) else []
        if proposed and not self._follows_text(drafts):
            unusable = (i for i, token in enumerate(proposed) if token in entry.end_ids or token >= vocab_size)
            end = next(unusable, len(proposed))
            return proposed[:end], self._proposal_chances(end)
        guesses = [] if text is None else text.guess(pending + limit)
        if not (
            entry.end_ids.isdisjoint(guesses) and -1 < min(guesses, default=0) <= max(guesses, default=0) < vocab_size
        ):
            usable = takewhile(lambda token: 0 <= token < vocab_size and token not in entry.end_ids, guesses)
            guesses = list(usable)
        following = self._chances.following(drafts.match_length, len(guesses))
        each = [chance if (chance := share * factor) < HIGHEST_CHANCE else HIGHEST_CHANCE for share in following]
        chances = [chance for chance in accumulate(each, mul) if chance >= LOWEST_CHANCE]
        return guesses[pending : len(chances)], chances[pending:]


def _likeliest(guesses: list[tuple[Entry, list[int], list[float]]], least: float, count: int) -> dict[Entry, list[int]]:
    """The `count` drafts that are right with the highest chances, of which `least` is the lowest. Chances fall from
    draft to draft; of several with the lowest, the first requests have theirs."""
    chosen = {}
    num_equal = count - sum(bisect_left(chances, -least, key=neg) for _, _, chances in guesses)
    for entry, drafts, chances in guesses:
        above = bisect_left(chances, -least, key=neg)
        equal = min(bisect_right(chances, -least, key=neg) - above, num_equal)
        num_equal -= equal
        if above + equal:
            chosen[entry] = drafts[: above + equal]
    return chosen


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
