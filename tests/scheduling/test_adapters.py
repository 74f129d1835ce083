"""Which adapters are on the device: room, least recently used, waiting, and the prefix cache."""

from __future__ import annotations

from legato.scheduling.adapters import AdapterInfo, AdapterSlots
from legato.scheduling.limits import Refusal, SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, StepPlan, StepResult


def scheduler_with(num_pages: int, *sizes: int, rows: int = 8) -> Scheduler:
    """Adapters 1, 2, … of these sizes."""
    scheduler = Scheduler(SchedulerLimits(64, 4, rows, 64, num_adapter_pages=num_pages))
    for number, size in enumerate(sizes, 1):
        scheduler.adapters.add(AdapterInfo(number, f"a{number}", size))
    return scheduler


def request(request_id: int, adapter: int = 0, tokens: int = 5, new: int = 3) -> GenerationRequest:
    return GenerationRequest(request_id, list(range(10, 10 + tokens)), new, adapter=adapter)


def finish(scheduler: Scheduler, plan: StepPlan) -> None:
    """Every row of the plan that samples gets a token."""
    step = next(each for each in scheduler._in_flight if each.plan is plan)
    count = sum(samples for *_, samples in step.planned)
    scheduler.complete(StepResult(plan.id, [7] * count, [0.0] * count))


def run(scheduler: Scheduler, now: float = 0.0) -> StepPlan | None:
    plan = scheduler.plan(now)
    if plan is not None:
        finish(scheduler, plan)
    return plan


def test_an_adapter_is_placed_once_and_held_by_its_requests() -> None:
    scheduler = scheduler_with(8, 2, 3)
    for number in range(1, 5):
        scheduler.submit(request(number, adapter=1 + number % 2))
    plan = run(scheduler)
    assert plan is not None
    assert sorted(placement.name for placement in plan.placements) == ["a1", "a2"]
    pages = [page for placement in plan.placements for page in placement.pages]
    assert len(set(pages)) == 5 and all(0 <= page < 8 for page in pages)
    slots = {placement.name: placement.slot for placement in plan.placements}
    assert {admission.adapter_name: admission.adapter_slot for admission in plan.admitted} == slots
    while run(scheduler):
        pass
    assert [resident.num_users for resident in scheduler.adapters.residents.values()] == [0, 0]
    scheduler.submit(request(9, adapter=2))
    again = run(scheduler)
    assert again is not None and again.placements == [] and again.admitted[0].adapter_slot == slots["a2"]


def test_an_adapter_is_placed_again_until_a_step_that_placed_it_has_succeeded() -> None:
    """A step that fails may not have come so far, and the next one is planned before that is known."""
    scheduler = scheduler_with(8, 2)

    def placed_by(request_id: int, *, num_requests: int = 1) -> StepPlan:
        for number in range(num_requests):
            scheduler.submit(request(request_id + number, adapter=1, tokens=3, new=50))
        plan = scheduler.plan()
        assert plan is not None and len(plan.admitted) == num_requests
        return plan

    failing, behind = placed_by(1, num_requests=2), placed_by(3)
    (first,), (second,) = failing.placements, behind.placements
    assert (first.slot, first.pages) == (second.slot, second.pages)
    scheduler.complete(StepResult(failing.id, [], [], error="out of memory"))
    assert len(placed_by(5).placements) == 1
    finish(scheduler, behind)
    assert placed_by(6).placements == []


def test_the_least_recently_used_makes_room() -> None:
    slots = AdapterSlots(4)
    for number in (1, 2, 3):
        slots.add(AdapterInfo(number, str(number), 2))
    for number in (1, 2, 1):
        slots.hold(number)
        slots.release(number)
    placement = slots.hold(3)
    assert placement is not None and set(slots.residents) == {1, 3}
    assert not slots.free_pages
    assert len({page for resident in slots.residents.values() for page in resident.pages}) == 4


def test_who_waits_for_room_is_overtaken_for_a_moment_and_then_no_more() -> None:
    scheduler = scheduler_with(2, 2, 2)
    scheduler.submit(request(1, adapter=1, new=50), now=0.0)
    run(scheduler)
    scheduler.submit(request(2, adapter=2), now=1.0)
    scheduler.submit(request(3), now=1.0)
    scheduler.submit(request(4, adapter=1), now=1.0)
    run(scheduler, now=1.1)
    assert {entry.id for entry in scheduler.running} == {1, 3, 4}, "others get in"
    scheduler.submit(request(5), now=4.0)
    run(scheduler, now=4.0)
    assert 5 not in {entry.id for entry in scheduler.running}, "two has waited long enough"
    scheduler.cancel(1)
    scheduler.cancel(4)
    plan = run(scheduler, now=4.1)
    assert plan is not None and [placement.name for placement in plan.placements] == ["a2"]
    assert {2, 5} <= {entry.id for entry in scheduler.running}


def test_prefixes_belong_to_an_adapter() -> None:
    scheduler = scheduler_with(8, 1, 1)

    def num_cached(request_id: int, adapter: int) -> int:
        scheduler.submit(request(request_id, adapter, tokens=13))
        plan = run(scheduler)
        assert plan is not None
        while run(scheduler):
            pass
        return plan.admitted[0].num_cached

    assert [num_cached(1, 1), num_cached(2, 1), num_cached(3, 2), num_cached(4, 0)] == [0, 12, 0, 0]
    assert [num_cached(5, 2), num_cached(6, 0)] == [12, 12]


def test_an_unloaded_adapter_leaves_nothing_behind() -> None:
    scheduler = scheduler_with(8, 3)
    scheduler.submit(request(1, adapter=1, tokens=13))
    while run(scheduler):
        pass
    assert len(scheduler.tree) > 0
    scheduler.adapters.unload(1, scheduler.tree, scheduler.pool)
    assert len(scheduler.tree) == 0 and scheduler.pool.available == scheduler.pool.total
    assert not scheduler.adapters.residents and len(scheduler.adapters.free_pages) == 8
    output = scheduler.submit(request(2, adapter=1))
    assert output is not None and output.is_unknown and output.error == Refusal.UNKNOWN_ADAPTER


def test_new_shards_know_no_adapter_on_the_device() -> None:
    scheduler = scheduler_with(8, 2)
    scheduler.submit(request(1, adapter=1, new=10))
    first = run(scheduler)
    scheduler.restart(scheduler.limits)
    again = run(scheduler)
    assert first is not None and again is not None
    assert len(again.placements) == 1 and again.admitted[0].adapter_name == "a1"
