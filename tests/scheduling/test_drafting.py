"""Drafts: where they come from, whose they are, and when they are worth their time."""

from __future__ import annotations

import itertools
import random
import time
from array import array
from typing import Any

import pytest

from legato.scheduling.drafting import MOST_OWN_TOKENS, MOST_UNREAD, RequestDrafts, _likeliest
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import NO_PROPOSAL, GenerationRequest, StepPlan, StepResult
from legato.scheduling.step_costs import HIGHEST_CHANCE, MeasuredStep, StepCosts, StepPace
from legato.scheduling.suffix_index import MOST_INDEXED, MOST_RECENT_TOKENS, PromptIndex, RecentAnswers, TextMatch
from tests.fakes import Simulation, check_blocks, expected_tokens

LIMITS = SchedulerLimits(num_blocks=200, block_size=4, max_rows=8, max_step_tokens=64, speculate=6, vocab_size=50)


def longest_match(text: list[int], source: list[int]) -> int:
    """The definition: of all places in `source`, the most tokens before it that are the last of `text`."""

    def common(end: int) -> int:
        return next((n for n in range(min(end, len(text))) if text[-1 - n] != source[end - 1 - n]), min(end, len(text)))

    return max((common(end) for end in range(1, len(source))), default=0)


# ---- guesses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_match_is_followed(seed: int) -> None:
    """In a text of few letters, token by token."""
    rng = random.Random(seed)
    prompt = [rng.randrange(4) for _ in range(30)]
    text = array("q", prompt)
    match = TextMatch(text, len(text), None)
    for _ in range(60):
        copied = text[-7] if rng.random() < 0.8 else rng.randrange(4)
        text.append(copied)
        guessed = match.guess(1)
        assert match.read() == (None if not guessed else guessed == [copied])
        if match.length:
            before = list(text)
            assert 2 <= match.length <= longest_match(before, before)
            assert before[-match.length :] == list(match._source)[match._position - match.length : match._position]


def test_a_loop_is_guessed_on_and_on() -> None:
    match = TextMatch(array("q", [7, 1, 2, 3, 1, 2, 3, 1, 2]), 9, None)
    assert match.guess(7) == [3, 1, 2, 3, 1, 2, 3]


def test_recent_answers_are_guessed_from_and_the_oldest_are_forgotten() -> None:
    answers, rng = RecentAnswers(), random.Random(1)
    texts = [array("q", [rng.randrange(10_000) for _ in range(1000)]) for _ in range(80)]
    for text in texts:
        answers.add(text)
    assert len(answers.tokens) <= MOST_RECENT_TOKENS
    for _ in range(-(-MOST_RECENT_TOKENS // MOST_INDEXED)):
        answers.catch_up()
    assert TextMatch(texts[-1][100:110], 10, answers).guess(5) == texts[-1][110:115].tolist()
    assert TextMatch(texts[0][100:110], 10, answers).guess(5) == []
    end = TextMatch(texts[-1][-10:], 10, answers).guess(5)
    assert end == [] or end[0] < 0, "a guess does not run on into another answer"


def test_a_prompt_with_digests_of_images_is_indexed() -> None:
    tokens = array("q", [5, (1 << 62) + 3, (1 << 62) + 3, 6, 7, 8, 6, 7])
    assert list(PromptIndex(tokens, 8).behind((6 * 1_000_003 + 7) & ((1 << 62) - 1))) == [8, 5]
    assert TextMatch(tokens, 8, None).guess(2) == [8, 6]


def test_a_match_is_found_after_a_long_text_without_any() -> None:
    """Such a text is read some tokens at a time: the match may be found some tokens late, and is the same."""
    rng = random.Random(3)
    text = array("q", [rng.randrange(10_000) for _ in range(50)])
    match, every = TextMatch(text, 50, None), TextMatch(text, 50, None)
    fresh = [rng.randrange(10_000) for _ in range(100)]
    for token in [*fresh, *fresh[20:30]]:
        text.append(token)
        every.read()
    match.skip()
    match.read()
    assert match.unread() == 0 and match.length == every.length >= 10
    assert match.guess(5) == every.guess(5) == fresh[30:35]


def test_a_token_takes_a_few_microseconds() -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(3000) for _ in range(4000)]
    text = array("q", prompt)
    match = TextMatch(text, len(text), None)
    answer = prompt[1000:1500] + [rng.randrange(3000) for _ in range(500)]
    fastest = 1.0
    for token in answer:
        text.append(token)
        started = time.perf_counter()
        match.read()
        match.guess(8)
        fastest = min(fastest, time.perf_counter() - started)
    assert fastest < 20e-6


# ---- through the scheduler -------------------------------------------------------------------------------------------


def answered(simulation: Simulation, request: GenerationRequest) -> tuple[list[int], int]:
    simulation.submit(request)
    simulation.run()
    outputs = simulation.outputs[request.id]
    check_blocks(simulation.scheduler)
    return [output.token_id for output in outputs], sum(output.is_draft for output in outputs)


def test_a_text_is_the_same_and_takes_fewer_steps() -> None:
    prompt = [1, 2, 3, 4, 5]
    simulation = Simulation(LIMITS)
    for number in range(2):
        request = GenerationRequest(number, prompt, 30, ignore_eos=True)
        tokens, num_drafts = answered(simulation, request)
        assert tokens == expected_tokens(request, 50)
    assert num_drafts > 15, "the second time the answer is known"


def test_no_drafts_come_from_another_tenant() -> None:
    prompt = [1, 2, 3, 4, 5]
    simulation = Simulation(LIMITS)
    answered(simulation, GenerationRequest(1, prompt, 30, ignore_eos=True, tenant="a"))
    assert answered(simulation, GenerationRequest(2, prompt, 30, ignore_eos=True, tenant="b"))[1] == 0
    assert answered(simulation, GenerationRequest(3, prompt, 30, ignore_eos=True, tenant="a"))[1] > 15


class Decoding:
    """Requests that decode, each step of which takes `seconds`, of which the device computes a share."""

    def __init__(
        self, limits: SchedulerLimits, requests: list[GenerationRequest], seconds: float, share: float
    ) -> None:
        self.scheduler, self._seconds, self._share, self._now = Scheduler(limits), seconds, share, 0.0
        for request in requests:
            self.scheduler.submit(request)

    @property
    def drafts(self) -> list[RequestDrafts]:
        return [entry.drafts for entry in self.scheduler.running if entry.drafts is not None]

    def step(self, token: int | None = None, proposed: int | None = None) -> StepPlan:
        """All requests get this token, or one that they have not had."""
        plan = self.scheduler.plan(self._now)
        assert plan is not None
        self._now += self._seconds
        planned = self.scheduler._in_flight[0].planned
        tokens = [1000 + len(entry.tokens) if token is None else token for entry, *_, samples in planned if samples]
        result = StepResult(plan.id, tokens, [0.0] * len(tokens), forward_ns=round(self._share * self._seconds * 1e9))
        result.num_sampled = [1] * len(tokens)
        result.proposed_ids = [NO_PROPOSAL if proposed is None else proposed] * plan.num_proposals * len(tokens)
        self.scheduler.complete(result, self._now)
        return plan


ROOM = SchedulerLimits(num_blocks=9000, block_size=16, max_rows=64, max_step_tokens=8192, speculate=6)


def repeating(count: int, prompt: int = 20, **settings: Any) -> list[GenerationRequest]:
    return [GenerationRequest(i, [5] * prompt, 10_000, ignore_eos=True, **settings) for i in range(count)]


def test_no_drafts_are_looked_for_where_the_device_waits_for_the_router() -> None:
    """As with a fake shard whose steps take no time. It may change."""
    idle, busy = (Decoding(ROOM, repeating(8), 0.002, share) for share in (0.0, 0.9))
    for _ in range(30):
        last, drafted = idle.step(5), busy.step(5)
    assert not last.drafts and drafted.drafts
    read = [drafts.text.unread() for drafts in idle.drafts if drafts.text is not None]
    idle._share = 0.9
    for _ in range(5):
        last = idle.step(5)
    assert last.drafts and min(read) > 10


class TwoTenants(Decoding):
    """`a` says something new with every token, `b` the same again and again. A step with drafts takes longer."""

    def __init__(self, num_rows: dict[str, int], price: float) -> None:
        ids = itertools.count()
        requests = [
            GenerationRequest(next(ids), [5] * 20, 10_000, ignore_eos=True, tenant=tenant)
            for tenant, number in num_rows.items()
            for _ in range(number)
        ]
        super().__init__(ROOM, requests, 0.01, 0.9)
        self._price = price
        self._new = itertools.count(1000)

    def run(self, num_steps: int) -> int:
        """How many of the last steps had drafts."""
        num_drafted = 0
        for number in range(2 * num_steps):
            plan = self.scheduler.plan(self._now)
            assert plan is not None
            forward = 0.01 * (1 + self._price * bool(plan.drafts))
            self._now += forward
            entries = [entry for entry, *_, samples in self.scheduler._in_flight[0].planned if samples]
            tokens = [next(self._new) if entry.request.tenant == "a" else 5 for entry in entries]
            result = StepResult(plan.id, tokens, [0.0] * len(tokens), forward_ns=round(forward * 1e9))
            result.num_sampled = [1] * len(tokens)
            self.scheduler.complete(result, self._now)
            num_drafted += number >= num_steps and bool(plan.drafts)
        return num_drafted


def test_drafts_of_one_tenant_do_not_slow_down_the_streams_of_another() -> None:
    assert TwoTenants({"b": 16}, price=0.5).run(100) > 90
    assert TwoTenants({"a": 4, "b": 12}, price=0.5).run(100) <= 5
    assert TwoTenants({"b": 12, "c": 4}, price=0.5).run(100) > 90, "both get faster"
    assert TwoTenants({"a": 4, "b": 12}, price=0.01).run(100) > 90, "nobody notices"


def test_an_index_of_a_long_answer_stays_small() -> None:
    decoding = Decoding(ROOM, repeating(1), 0.01, 0.9)
    decoding.step()
    sizes, unread = [], []
    for _ in range(6000):
        decoding.step()
        (drafts,) = decoding.drafts
        assert drafts.text is not None
        sizes.append(drafts.text.num_own)
        unread.append(drafts.text.unread())
    assert MOST_OWN_TOKENS - 100 < max(sizes) <= MOST_OWN_TOKENS + MOST_UNREAD and sizes[-1] < max(sizes)
    assert max(unread) <= MOST_UNREAD
    assert drafts.text.guess(1) == []


def test_a_plan_indexes_some_texts_and_the_next_one_others() -> None:
    """Recent answers count, too."""
    decoding = Decoding(ROOM, repeating(64, prompt=100), 0.01, 0.9)
    for number in range(100):
        text = array("q", [number * 300 + place for place in range(300)])
        decoding.scheduler._drafter._answers.add("", text)
    counts = []
    for _ in range(40):
        decoding.step()
        counts.append(sum(drafts.text is not None for drafts in decoding.drafts))
    per_plan = [after - before for before, after in itertools.pairwise([0, *counts])]
    assert counts[-1] == 64 and max(per_plan) <= 16
    assert 0 < next(filter(None, per_plan)) <= 2, "the first ones had to index answers"


def test_texts_are_not_indexed_for_what_a_grammar_forces() -> None:
    """A result may be of many requests with long prompts, and is booked at once."""
    requests = repeating(8, prompt=1000, has_grammar=True)
    decoding = Decoding(ROOM, requests, 0.01, 0.9)
    indexed = []
    for _ in range(4):
        decoding.step(7, proposed=7)
        indexed.append([drafts.text is not None for drafts in decoding.drafts])
    assert decoding.drafts and all(drafts.proposed_ids for drafts in decoding.drafts)
    assert sum(indexed[-1]) > 0, "a plan did"


def test_who_is_preempted_has_no_index() -> None:
    decoding = Decoding(ROOM, repeating(2), 0.01, 0.9)
    for _ in range(5):
        decoding.step(5)
    entry = decoding.scheduler.running[-1]
    assert entry.drafts is not None
    decoding.scheduler._preempt(entry)
    assert entry.drafts is None


# ---- time ------------------------------------------------------------------------------------------------------------


def times(plain: float, waited: dict[int, float], num_rows: int = 1) -> StepCosts:
    found = StepCosts()
    found.learn(MeasuredStep(num_rows, num_rows, False, False, plain, plain))
    for num_tokens, seconds in waited.items():
        found.learn(MeasuredStep(num_rows, num_tokens, True, True, seconds, seconds))
    return found


def test_waiting_for_a_result_is_part_of_the_price() -> None:
    """Also where it shows only in the step behind: the one with drafts had been sent while others ran."""
    found = times(0.03, {})
    for _ in range(3):
        found.learn(MeasuredStep(1, 2, True, False, 0.03, 0.03))
        found.learn(MeasuredStep(1, 1, False, True, 0.03, 0.04))
    assert found.num_worth(1, [0.25]) == 0 and found.num_worth(1, [0.5]) == 1


def test_as_many_drafts_are_taken_as_pay() -> None:
    flat = times(0.03, {5: 0.03, 9: 0.03})
    assert flat.num_worth(1, [0.9, 0.8, 0.7, 0.6]) == 4
    steep = times(0.03, {2: 0.031, 3: 0.06, 9: 0.3})
    assert steep.num_worth(1, [0.9, 0.8, 0.7, 0.6]) == 1
    assert steep.num_worth(1, [0.03]) == 0


def test_texts_are_not_read_where_no_draft_could_pay() -> None:
    """Each draft costs a row of its own: requests' texts are not even looked at, until times are measured again."""
    found = times(0.03, {5: 0.16, 9: 0.29}, num_rows=4)
    assert not found.can_pay(4, 8)
    assert times(0.03, {5: 0.031, 9: 0.035}, num_rows=4).can_pay(4, 8)
    assert any(found.can_pay(4, 8) for _ in range(400)), "what was measured once fades"


@pytest.mark.parametrize("seed", range(20))
def test_what_can_pay_is_a_bound(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.choice([1, 3, 8])
    sizes = sorted(rng.sample(range(num_rows + 1, 40), rng.randrange(4)))
    costs = {size: 0.03 + rng.random() * 0.003 * size for size in sizes}
    most = rng.randrange(1, 50)
    worth = times(0.03, costs, num_rows).num_worth(num_rows, [HIGHEST_CHANCE] * most)
    assert times(0.03, costs, num_rows).can_pay(num_rows, most) == (worth > 0)


def test_what_speaks_against_drafts_is_tried_again() -> None:
    slow = times(0.03, {2: 0.05})
    decisions = [slow.num_worth(1, [0.5]) for _ in range(200)]
    assert decisions[0] == 0 and 1 in decisions[20:]


def test_sizes_that_were_never_measured_are_tried_step_by_step() -> None:
    found = times(0.03, {64: 0.031}, num_rows=64)
    assert 0 < found.num_worth(64, [0.5] * 1000) < 200


def test_sizes_beyond_those_that_were_measured_are_not_free() -> None:
    """As on a CPU, where every token costs the same: 48 drafts would pay if they cost what 16 do."""
    found = times(0.016, {24: 0.024, 32: 0.032}, num_rows=16)
    assert found.num_worth(16, [0.5] * 48) == 0


def test_what_steps_of_about_as_many_rows_have_shown_is_used_when_requests_end() -> None:
    """Without a step to learn what 60 or 33 rows cost. Of 8 rows nothing is known: the next step has no drafts."""
    found = times(0.005, {128: 0.006, 256: 0.009}, num_rows=64)
    chances = [0.8] * 192
    assert found.num_worth(60, chances) == found.num_worth(64, chances) > 0
    assert found.can_pay(44, 100) and not found.can_pay(8, 100)
    assert found.num_worth(8, chances) == 0
    slow = times(0.005, {128: 0.02, 256: 0.04}, num_rows=64)
    assert slow.num_worth(60, chances) == 0


def test_of_equal_chances_the_first_requests_have_theirs() -> None:
    entries = ["a", "b", "c"]
    guesses = [(entry, [1, 2, 3], [0.5, 0.25, 0.25]) for entry in entries]
    assert _likeliest(guesses, 0.5, 2) == {"a": [1], "b": [1]}  # type: ignore[arg-type]
    assert _likeliest(guesses, 0.25, 6) == {"a": [1, 2, 3], "b": [1, 2], "c": [1]}  # type: ignore[arg-type]


def test_there_is_room_for_drafts_when_all_rows_are_taken() -> None:
    limits = SchedulerLimits(num_blocks=200, block_size=4, max_rows=64, max_step_tokens=512)
    assert limits.max_sampled >= 4 * limits.max_rows
    assert SchedulerLimits(num_blocks=200, block_size=4, max_rows=8, max_step_tokens=64).max_sampled == 64


def test_the_time_of_a_step_begins_with_the_result_before_it() -> None:
    pace = StepPace()
    pace.begin(1.0)
    pace.begin(1.0)
    assert pace.end(1.3) == pytest.approx(0.3)
    assert pace.end(1.5) == pytest.approx(0.2), "it waited for the first"
    pace.begin(1.501)
    assert pace.end(1.8) == pytest.approx(0.3), "planned because of the second"
    pace.begin(5.0)
    assert pace.end(5.1) == pytest.approx(0.1), "nothing ran before"
