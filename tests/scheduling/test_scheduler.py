"""The scheduler against a fake shard: same tokens whatever happens around a request, and no block ever lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from legato.scheduling.blocks import BlockPool
from legato.scheduling.entry import MAX_ADMISSION_WORK
from legato.scheduling.limits import MAX_LOSSES, Refusal, SchedulerLimits
from legato.scheduling.prefix_tree import Node
from legato.scheduling.queue import AGING_SECONDS
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import FinishReason, GenerationRequest, StepPlan, StepResult
from tests.fakes import Simulation, check_blocks, expected_tokens

VOCAB = 50


def limits(**changes: object) -> SchedulerLimits:
    defaults: dict[str, object] = dict(num_blocks=65, block_size=4, max_rows=8, max_step_tokens=32)
    return SchedulerLimits(**{**defaults, **changes})  # type: ignore[arg-type]


def request(request_id: int, prompt: list[int], max_new_tokens: int = 10, **more: object) -> GenerationRequest:
    return GenerationRequest(request_id, prompt, max_new_tokens, **more)  # type: ignore[arg-type]


def test_a_request_gets_the_models_tokens_and_ends_by_length() -> None:
    simulation = Simulation(limits())
    simulation.submit(request(1, [3, 1, 4], 6))
    simulation.run()
    assert simulation.tokens(1) == expected_tokens(request(1, [3, 1, 4], 6), VOCAB)
    assert simulation.outputs[1][-1].finish_reason is FinishReason.LENGTH
    assert simulation.scheduler.pool.available + len(simulation.scheduler.tree) == 64


def test_unused_prefixes_are_kept_up_to_their_limit() -> None:
    simulation = Simulation(limits(max_unused_blocks=5))
    for number in range(4):
        simulation.submit(request(number, [number] * 20, 4))
        simulation.run()
        check_blocks(simulation.scheduler)
    scheduler = simulation.scheduler
    assert scheduler.tree.num_evictable == len(scheduler.tree) == 5
    assert scheduler.pool.available == 64 - 5
    simulation.submit(request(9, [3] * 20, 4))  # the last is still there
    simulation.run()
    assert scheduler.stats.cached_tokens == 16


def test_blocks_that_were_used_are_taken_once() -> None:
    pool = BlockPool(10)
    first = pool.allocate(4)
    pool.free(first[:3])
    assert pool.take_used() == first[:3]
    assert pool.available == 5 and not set(pool.allocate(5)) & set(first)
    pool.free(first[:3])
    assert pool.available == 3 and pool.take_used() == []


def test_eos_ends_a_request_unless_it_is_ignored() -> None:
    eos = frozenset(range(0, VOCAB, 5))
    for ignore in (False, True):
        simulation = Simulation(limits(eos_token_ids=eos))
        wanted = request(1, [3, 1, 4], 30, ignore_eos=ignore)
        simulation.submit(wanted)
        simulation.run()
        assert simulation.tokens(1) == expected_tokens(wanted, VOCAB, eos)
        assert simulation.outputs[1][-1].finish_reason is (FinishReason.LENGTH if ignore else FinishReason.EOS_TOKEN)


@pytest.mark.parametrize("step_tokens", [8, 9, 13, 512])
def test_prompts_are_cut_into_chunks_that_fit_the_budget(step_tokens: int) -> None:
    simulation = Simulation(limits(max_step_tokens=step_tokens))
    wanted = [request(i, list(range(i, i + 23)), 8) for i in range(4)]
    for each in wanted:
        simulation.submit(each)
    simulation.run()
    for each in wanted:
        assert simulation.tokens(each.id) == expected_tokens(each, VOCAB)


def test_a_newcomer_joins_the_running_batch_at_the_next_step() -> None:
    simulation = Simulation(limits(), depth=1)
    simulation.submit(request(1, [1, 2, 3], 20))
    for _ in range(3):
        simulation.launch()
        simulation.land()
    simulation.submit(request(2, [4, 5], 5))
    simulation.launch()
    assert len(simulation.in_flight[0].rows) == 2


def test_a_decode_keeps_its_token_beside_a_long_prompt() -> None:
    simulation = Simulation(limits(max_step_tokens=8), depth=1)
    simulation.submit(request(1, [1, 2, 3], 20))
    simulation.launch()
    simulation.land()
    simulation.submit(request(2, list(range(40)), 5))
    for _ in range(5):
        before = len(simulation.outputs[1])
        simulation.launch()
        simulation.land()
        assert len(simulation.outputs[1]) == before + 1


def test_the_prefix_of_an_earlier_request_is_not_computed_again() -> None:
    simulation = Simulation(limits())
    simulation.submit(request(1, list(range(20)), 4))
    simulation.run()
    simulation.submit(request(2, [*range(20), 30, 31], 4))
    simulation.launch()
    assert simulation.in_flight[0].admitted[0].num_cached == 20
    simulation.run()
    assert simulation.tokens(2) == expected_tokens(request(2, [*range(20), 30, 31], 4), VOCAB)


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation() -> None:
    simulation = Simulation(limits())
    simulation.submit(request(1, list(range(8)), 13))
    simulation.run()
    history = [*range(8), *simulation.tokens(1)]
    simulation.submit(request(2, [*history, 7, 7], 4))
    simulation.launch()
    assert simulation.in_flight[0].admitted[0].num_cached == 20  # the 21st was sampled but never computed


def test_a_fully_cached_prompt_still_computes_a_token() -> None:
    simulation = Simulation(limits())
    simulation.submit(request(1, list(range(8)), 4))
    simulation.run()
    simulation.submit(request(2, list(range(8)), 4))
    simulation.launch()
    assert simulation.in_flight[0].admitted[0].num_cached == 4
    simulation.run()
    assert simulation.tokens(2) == simulation.tokens(1)


def test_requests_that_begin_alike_and_arrive_together_compute_their_prefix_once() -> None:
    simulation = Simulation(limits(max_step_tokens=64))
    wanted = [request(i, [*range(40), 40 + i, 1], 3) for i in range(8)]
    for each in wanted:
        simulation.submit(each)
    computed = 0
    while simulation.launch() or simulation.in_flight:
        while simulation.launch():
            pass
        computed += sum(simulation.in_flight[0].num_tokens)
        simulation.land()
    assert computed <= 42 + 7 * 2 + 8 * 2
    for each in wanted:
        assert simulation.tokens(each.id) == expected_tokens(each, VOCAB)


def test_a_stranger_does_not_wait_behind_a_shared_prefix() -> None:
    simulation = Simulation(limits(max_step_tokens=64))
    for i in range(3):
        simulation.submit(request(i, [*range(40), 40 + i, 1], 3))
    simulation.submit(request(9, [7, 7, 7], 3))
    simulation.launch()
    assert [admission.request.id for admission in simulation.in_flight[0].admitted] == [0, 9]


def test_without_prefix_caching_nothing_stays() -> None:
    simulation = Simulation(limits(prefix_caching=False))
    simulation.submit(request(1, list(range(20)), 4))
    simulation.run()
    assert len(simulation.scheduler.tree) == 0
    assert simulation.scheduler.pool.available == 64


def test_prompt_logprobs_cover_every_prompt_token_in_spite_of_chunks_and_cache() -> None:
    simulation = Simulation(limits(max_step_tokens=8))
    simulation.submit(request(1, list(range(20)), 2))
    simulation.run()
    simulation.submit(request(2, list(range(20)), 2, prompt_logprobs=True))
    simulation.run()
    assert simulation.outputs[2][0].prompt_logprobs == [None, *(-float(p) for p in range(19))]
    assert simulation.outputs[2][1].prompt_logprobs is None


def test_preemption_changes_no_token() -> None:
    simulation = Simulation(limits(num_blocks=13, max_rows=4))
    wanted = [request(i, list(range(i, i + 9)), 25) for i in range(4)]
    for each in wanted:
        simulation.submit(each)
    simulation.run()
    assert simulation.scheduler.stats.preemptions > 0
    for each in wanted:
        assert simulation.tokens(each.id) == expected_tokens(each, VOCAB)
    check_blocks(simulation.scheduler)


def test_the_oldest_request_is_never_preempted() -> None:
    simulation = Simulation(limits(num_blocks=13, max_rows=4))
    for i in range(4):
        simulation.submit(request(i, list(range(i, i + 9)), 25))
    oldest = simulation.scheduler._entries[0]
    simulation.launch()
    epoch = oldest.epoch
    while not oldest.done:
        simulation.launch()
        simulation.land()
        assert oldest.epoch == epoch


def test_a_failed_step_fails_its_requests_and_frees_their_blocks() -> None:
    simulation = Simulation(limits())
    simulation.submit(request(1, list(range(9)), 25))
    simulation.launch()
    simulation.submit(request(2, list(range(9)), 5))
    simulation.launch()
    plan = simulation.in_flight.pop(0)
    simulation.shard.run(plan)  # the row is lost, but the shard must still answer for it in the step behind
    (failed,) = simulation.scheduler.complete(StepResult(plan.id, [], [], error="out of memory"))
    assert failed[0] == 1 and failed[1].error == "out of memory"
    simulation.run()
    assert simulation.tokens(2) == expected_tokens(request(2, list(range(9)), 5), VOCAB)
    check_blocks(simulation.scheduler)


def test_cancelling_while_steps_are_in_flight_frees_everything_at_once() -> None:
    simulation = Simulation(limits(prefix_caching=False))
    simulation.submit(request(1, list(range(9)), 25))
    simulation.launch()
    simulation.launch()
    simulation.scheduler.cancel(1)
    assert simulation.scheduler.pool.available == 64
    simulation.run()
    assert simulation.outputs[1] == []


def test_requests_of_one_step_fill_it_however_many_they_are() -> None:
    simulation = Simulation(limits(num_blocks=513, max_rows=64, max_step_tokens=256))
    for number in range(64):
        simulation.submit(request(number, [number, 1, 2, 3], 2))
    simulation.launch()
    assert len(simulation.in_flight[0].admitted) == 64


def check_requests(scheduler: Scheduler) -> None:
    """Every request runs or waits, in the order of its rank, and counts once for its tenant."""
    running = [entry.rank for entry in scheduler.running]
    assert running == sorted(running)
    waiting = {entry.id for entry in scheduler._entries.values() if entry.row is None}
    assert set(scheduler.queue) == waiting and len(scheduler.queue) == len(waiting)
    in_line = [id for level in scheduler.queue._levels.values() for line in level._lines.values() for id in line]
    assert sorted(in_line) == sorted(waiting), "somebody was called and not sent back"
    for name, tenant in scheduler._tenants._known.items():
        assert tenant.num_requests == sum(entry.request.tenant == name for entry in scheduler._entries.values())


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    assert len(set(plan.rows)) == len(plan.rows), "a row is in one plan twice"
    entered = {admission.row for admission in plan.admitted}
    assert len(entered) == len(plan.admitted)
    samples = [samples for *_, samples in scheduler._in_flight[-1].planned]
    rows = list(zip(plan.rows, plan.num_tokens, samples, strict=True))
    decodes = [row for row, count, samples in rows if count == 1 and samples and row not in entered]
    most = scheduler.limits.max_mixed_tokens
    assert most is None or not decodes or sum(plan.num_tokens) - len(decodes) <= most


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go, share prefixes and run out of time while steps start and end in any order the router could
    produce."""

    steps = 0

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        blocks=st.integers(14, 40),
        rows=st.integers(1, 5),
        budget=st.integers(5, 24),
        mixed=st.integers(2, 24),
        caching=st.booleans(),
        seed=st.integers(0, 2**31),
        timeouts=st.sampled_from([(0, 0), (3, 0), (0, 9), (3, 9)]),
        on_host=st.sampled_from([0, 1, 4, 50]),
    )
    def start(
        self, block_size: int, blocks: int, rows: int, budget: int, mixed: int, caching: bool, seed: int,
        timeouts: tuple[int, int], on_host: int,
    ) -> None:  # fmt: skip
        eos = frozenset({3, 7})
        num_blocks = 1 + blocks * 4 // block_size
        self.simulation = Simulation(
            limits(
                num_blocks=num_blocks,
                block_size=block_size,
                max_rows=rows,
                max_step_tokens=budget,
                eos_token_ids=eos,
                prefix_caching=caching,
                max_mixed_tokens=min(mixed, budget),
                mixed_step_time=0.05,
                queue_timeout=timeouts[0],
                request_timeout=timeouts[1],
                num_host_blocks=on_host,
            )
        )
        self.now = 0.0
        self.random = random.Random(seed)
        self.wanted: dict[int, GenerationRequest] = {}
        self.cancelled: set[int] = set()

    @rule(count=st.integers(1, 6), letters=st.integers(1, 3))
    def submit(self, count: int, letters: int) -> None:
        for _ in range(count):
            prompt = [self.random.randrange(letters) for _ in range(self.random.randint(1, 24))]
            wanted = request(
                len(self.wanted),
                prompt,
                self.random.randint(1, 24),
                ignore_eos=self.random.random() < 0.7,
                prompt_logprobs=self.random.random() < 0.2,
                priority=self.random.choice([0, 5, 5, 5, 9]),
                tenant=self.random.choice("aaab"),
            )
            self.wanted[wanted.id] = wanted
            self.simulation.outputs[wanted.id] = []
            self.simulation.scheduler.submit(wanted, self.now)

    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick: random.Random) -> None:
        alive = sorted(self.simulation.scheduler._entries)
        if alive:
            request_id = pick.choice(alive)
            self.cancelled.add(request_id)
            self.simulation.scheduler.cancel(request_id)

    @rule(seconds=st.sampled_from([0.5, 1, 2, 100]))
    def wait(self, seconds: float) -> None:
        """Whoever is ended had a deadline, and nobody else has one that is over."""
        self.now += seconds
        scheduler = self.simulation.scheduler
        epochs = {entry.id: entry.epoch for entry in scheduler._entries.values()}
        due = scheduler.next_deadline()
        expired = scheduler.expire(self.now)
        assert bool(expired) == (due is not None and due <= self.now)
        for request_id, output in expired:
            ran = output.error == Refusal.RAN_TOO_LONG.format(scheduler.limits.request_timeout)
            assert output.timed_out and (ran or epochs[request_id] == 0), "it waited, and never had a row"
            self.cancelled.add(request_id)
        check_requests(scheduler)
        for entry in scheduler._entries.values():
            age = self.now - (entry.rank[0] - AGING_SECONDS * entry.priority)
            assert not scheduler.limits.request_timeout or age < scheduler.limits.request_timeout
            assert not scheduler.limits.queue_timeout or entry.epoch or age < scheduler.limits.queue_timeout

    @rule()
    def lose(self) -> None:
        """The shards die. Requests that were part of it too often end; all others go on."""
        before = set(self.simulation.scheduler._entries)
        self.simulation.lose()
        ended = before - set(self.simulation.scheduler._entries)
        for request_id in ended:
            assert self.simulation.outputs[request_id].pop().error == Refusal.LOST_TOO_OFTEN.format(MAX_LOSSES + 1)
        self.cancelled |= ended
        check_blocks(self.simulation.scheduler)
        check_requests(self.simulation.scheduler)

    @rule(count=st.integers(1, 120))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.random.random() < 0.5 and self.simulation.launch():
                check_plan(self.simulation.in_flight[-1], self.simulation.scheduler)
            if self.random.random() < 0.5 and self.simulation.land():
                SchedulerMachine.steps += 1
            check_blocks(self.simulation.scheduler)
            check_requests(self.simulation.scheduler)

    @invariant()
    def every_token_is_the_models(self) -> None:
        if not hasattr(self, "wanted"):
            return
        for request_id, wanted in self.wanted.items():
            tokens = self.simulation.tokens(request_id)
            expected = expected_tokens(wanted, VOCAB, frozenset({3, 7}))
            assert tokens == expected[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "wanted"):
            return
        before = self.simulation.steps
        self.simulation.run()
        SchedulerMachine.steps += self.simulation.steps - before
        scheduler = self.simulation.scheduler
        check_blocks(scheduler)
        assert not scheduler.running and not scheduler.queue and not scheduler.num_in_flight
        assert scheduler.pool.available + len(scheduler.tree) == scheduler.pool.total
        for request_id, wanted in self.wanted.items():
            if request_id not in self.cancelled:
                assert self.simulation.tokens(request_id) == expected_tokens(wanted, VOCAB, frozenset({3, 7}))


def test_random_lives_of_a_scheduler() -> None:
    """100,000 steps with every invariant checked after each."""
    SchedulerMachine.steps = 0
    run = SchedulerMachine.TestCase
    while SchedulerMachine.steps < 100_000:
        run.settings = settings(
            max_examples=200,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=False,
        )
        run("runTest").runTest()


def test_a_full_scheduler_refuses_and_says_when_to_retry() -> None:
    limits = SchedulerLimits(num_blocks=65, block_size=4, max_rows=2, max_step_tokens=32, max_requests=3)
    simulation = Simulation(limits)
    scheduler = simulation.scheduler
    for number in range(3):
        assert scheduler.submit(request(number, [1, 2, 3]), now=100.0) is None
        simulation.outputs[number] = []
    refused = scheduler.submit(request(9, [1, 2, 3]), now=104.0)
    assert refused is not None and refused.error and refused.retry_after == 4
    scheduler.cancel(0)
    assert scheduler.submit(request(10, [1, 2, 3]), now=104.0) is None
    simulation.outputs[10] = []
    simulation.run()
    check_blocks(scheduler)


def test_the_lookups_of_one_plan_are_bounded_and_nobody_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """511 requests with a long cached prefix took 392 ms of the router's event loop in one plan."""
    limits = SchedulerLimits(num_blocks=4000, block_size=4, max_rows=64, max_step_tokens=256)
    simulation = Simulation(limits)
    scheduler, looked_up = simulation.scheduler, [0]
    match = scheduler.tree.match

    def counted(root: Node, tokens: bytes, max_blocks: int) -> tuple[Node, list[int]]:
        looked_up[0] += max_blocks
        return match(root, tokens, max_blocks)

    monkeypatch.setattr(scheduler.tree, "match", counted)
    prefix = [number % 97 for number in range(4 * 1000)]
    simulation.submit(request(0, prefix, 2))
    simulation.run()
    for number in range(1, 60):
        simulation.submit(request(number, [*prefix, number], 2))
    while True:
        looked_up[0] = 0
        if not (simulation.launch() or simulation.land()):
            break
        assert looked_up[0] <= MAX_ADMISSION_WORK + 1000  # the last one is looked up whole
    assert all(len(simulation.tokens(number)) == 2 for number in range(60))
    check_blocks(scheduler)


@pytest.mark.parametrize("num_emitted", [1, 3, 9])
def test_a_request_goes_on_after_tokens_of_another_server(num_emitted: int) -> None:
    expected = expected_tokens(request(1, [3, 1, 4], 10), VOCAB)
    simulation = Simulation(limits())
    simulation.submit(request(1, [3, 1, 4], 10, emitted_ids=expected[:num_emitted]))
    simulation.run()
    assert simulation.tokens(1) == expected[num_emitted:]
    assert simulation.outputs[1][-1].finish_reason is FinishReason.LENGTH
    check_blocks(simulation.scheduler)


def test_a_request_that_goes_on_learns_what_was_cached_with_its_first_token_here() -> None:
    expected = expected_tokens(request(1, [5] * 12, 12), VOCAB)
    simulation = Simulation(limits())
    simulation.submit(request(1, [5] * 12, 12))
    simulation.run()
    simulation.submit(request(2, [5] * 12, 12, emitted_ids=expected[:8]))
    simulation.run()
    assert simulation.tokens(2) == expected[8:]
    assert [output.num_cached for output in simulation.outputs[2]] == [12, 0, 0, 0]  # of the prompt
