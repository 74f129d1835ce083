"""Fair shares between tenants of equal priority, by the tokens that each was served."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.queue import LeastServed, Queue, Rank, Tenant, Tenants, rank
from legato.scheduling.state import GenerationRequest
from tests.fakes import Simulation

LIMITS = SchedulerLimits(num_blocks=257, block_size=4, max_rows=2, max_step_tokens=64)


class House:
    """A server that is always full."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.simulation = Simulation(limits, depth=1)
        self.ids = itertools.count()
        self.whose: dict[int, str] = {}
        self.order: list[str] = []

    def ask(self, tenant: str, count: int = 1, length: int = 10, answer: int = 5, priority: int = 5) -> None:
        for _ in range(count):
            number = next(self.ids)
            prompt = [number % 50, *range(length - 1)]
            self.whose[number] = tenant
            self.simulation.submit(GenerationRequest(number, prompt, answer, priority=priority, tenant=tenant))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.simulation.launch()
            if self.simulation.in_flight:
                plan = self.simulation.in_flight[0]
                self.order += [self.whose[admission.request.id] for admission in plan.admitted]
                self.simulation.land()

    def num_tokens(self, tenant: str) -> int:
        return sum(len(self.simulation.outputs[number]) for number, name in self.whose.items() if name == tenant)


def test_a_tenant_with_one_request_does_not_wait_behind_anothers_hundred() -> None:
    house = House()
    house.ask("flood", 100)
    house.run(20)
    house.order.clear()
    house.ask("visitor")
    house.run(20)
    assert house.order.index("visitor") <= 1


def test_tenants_get_the_same_number_of_tokens_whatever_their_requests_look_like() -> None:
    house = House()
    house.ask("short", 400, length=8, answer=3)
    house.ask("long", 100, length=8, answer=40)
    house.run(800)
    served = {name: tenant.served for name, tenant in house.simulation.scheduler._tenants._known.items()}
    assert abs(served["short"] - served["long"]) <= 2 * 48, "no more than what is running"
    assert house.num_tokens("short") > 0


def test_within_a_tenant_who_came_first_is_first() -> None:
    house = House()
    for _ in range(10):
        house.ask("a")
        house.ask("b")
    order: list[int] = []
    while house.simulation.launch() or house.simulation.in_flight:
        order += [admission.request.id for admission in house.simulation.in_flight[0].admitted]
        house.simulation.land()
    for tenant in ("a", "b"):
        mine = [number for number in order if house.whose[number] == tenant]
        assert mine == sorted(mine)


def test_idling_earns_no_credit() -> None:
    house = House()
    house.ask("busy", 200)
    house.ask("idle", 1)
    house.run(150)  # the idle one is served at once, and the other has the house to itself
    assert house.order.count("idle") == 1
    house.order.clear()
    house.ask("idle", 30)
    house.run(40)
    assert house.order.count("busy") >= len(house.order) // 2 - 2


def test_credit_is_not_earned_either_while_nobody_is_here() -> None:
    tenants = Tenants()
    first = tenants.enter("first")
    first.served += 1000
    tenants.leave(first)
    assert tenants.enter("second").served == 1000
    assert tenants.enter("first").served == 1000


def test_a_debt_is_not_forgotten_by_going_away() -> None:
    tenants = Tenants()
    greedy, modest = tenants.enter("greedy"), tenants.enter("modest")
    greedy.served += 1000
    modest.served += 10
    tenants.leave(greedy)
    assert tenants.enter("greedy").served == 1000
    assert tenants.enter("new").served == 10


def test_priority_comes_before_fairness() -> None:
    house = House()
    house.ask("rich", 20, priority=0)
    house.ask("poor", 20)
    house.run(400)
    assert house.order == ["rich"] * 20 + ["poor"] * 20


def test_the_least_served_is_found_however_often_the_numbers_change() -> None:
    tenants = [Tenant(str(number)) for number in range(20)]
    least = LeastServed(lambda tenant: tenant.num_requests > 0)
    for turn in range(2_000):
        tenant = tenants[turn * 7 % 20]
        tenant.num_requests ^= 1
        if tenant.num_requests:
            least.add(tenant)
        tenants[turn * 11 % 20].served += turn % 13
        present = [tenant.served for tenant in tenants if tenant.num_requests]
        found = least.first()
        assert (found.served if found else None) == min(present, default=None)
    assert len(least._heap) <= 20


@dataclass(eq=False)
class Waiter:
    id: int
    priority: int
    rank: Rank
    tenant: Tenant


def waiters(names: str, served: dict[str, int]) -> list[Waiter]:
    tenants = {name: Tenant(name, served.get(name, 0)) for name in names}
    return [Waiter(number, 5, rank(0, 5, number), tenants[name]) for number, name in enumerate(names)]


def test_those_who_are_called_and_not_served_keep_their_places() -> None:
    queue: Queue[Waiter] = Queue()
    everybody = waiters("aabbab", {"a": 3, "b": 1})
    for waiter in everybody:
        queue.push(waiter)
    called = [queue.call() for _ in range(5)]
    assert len(queue) == 6
    queue.send_back([waiter for waiter in called if waiter is not None])
    assert [queue.call() for _ in range(5)] == called


def test_one_who_leaves_is_not_called() -> None:
    queue: Queue[Waiter] = Queue()
    everybody = waiters("aab", {"a": 0, "b": 1})
    for waiter in everybody:
        queue.push(waiter)
    queue.remove(everybody[0])
    assert [queue.call(), queue.call(), queue.call()] == [everybody[1], everybody[2], None]
    queue.remove(everybody[1])  # also after it was called
    assert sorted(queue) == [2]
