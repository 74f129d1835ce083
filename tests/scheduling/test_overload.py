"""More requests than the model can serve: those that are taken are served as if the others had not come."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, StepPlan, StepResult

PROMPT, ANSWER, ROWS = 32, 32, 16
# A step: its weights, and a token of a row or of a prompt.
STEP_SECONDS, TOKEN_SECONDS = 0.010, 50e-6
# Too few for all rows at their full length, so that requests are preempted, too.
BLOCKS = ROWS * (PROMPT + ANSWER) // 16 * 3 // 4
QUEUE_TIMEOUT = 2.0


@dataclass
class OpenLoop:
    """Requests that come at a rate, whether or not those before them are answered, and do not come back."""

    rate: float
    clock: float = 0.0
    num_refused: int = 0
    answered: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(1)
        self._next_arrival, self._next_id = 0.0, 1
        self._plans: list[StepPlan] = []
        self._scheduler = Scheduler(
            SchedulerLimits(
                num_blocks=BLOCKS,
                block_size=16,
                max_rows=ROWS,
                max_step_tokens=256,
                max_requests=64,
                queue_timeout=QUEUE_TIMEOUT,
            )
        )

    def run(self, seconds: float) -> float:
        """Answers a second, without the start."""
        while self.clock < seconds:
            self._arrive()
            while len(self._plans) < 2 and (plan := self._scheduler.plan(self.clock)) is not None:
                self._plans.append(plan)
            if self._plans:
                self._land(self._plans.pop(0))
            else:
                self.clock = self._next_arrival
        return sum(at > seconds / 5 for at in self.answered) / (seconds * 4 / 5)

    def _arrive(self) -> None:
        while self._next_arrival <= self.clock:
            prompt = [self._rng.randrange(50_000) for _ in range(PROMPT)]
            refused = self._scheduler.submit(GenerationRequest(self._next_id, prompt, ANSWER), self.clock)
            if refused is not None:
                assert refused.retry_after >= 1
                self.num_refused += 1
            self._next_id += 1
            self._next_arrival += self._rng.expovariate(self.rate)
        self.num_refused += len(self._scheduler.expire(self.clock))

    def _land(self, plan: StepPlan) -> None:
        took = STEP_SECONDS + TOKEN_SECONDS * sum(plan.num_tokens)
        self.clock += took
        num = sum(samples for *_, samples in self._scheduler._in_flight[0].planned)
        result = StepResult(plan.id, [7] * num, [0.0] * num, forward_ns=int(took * 1e9))
        outputs = self._scheduler.complete(result)
        self.answered += [self.clock for _, output in outputs if output.finish_reason is not None]


def test_ten_times_the_capacity_costs_a_tenth_of_the_goodput_at_most() -> None:
    closed = OpenLoop(rate=1000.0)
    capacity = closed.run(10.0)  # what comes out when there is always somebody
    at_capacity, overloaded = OpenLoop(rate=capacity), OpenLoop(rate=10 * capacity)
    peak = max(at_capacity.run(30.0), capacity)
    goodput = overloaded.run(30.0)
    print(f"{capacity:.1f} a second; at 10 times that {goodput:.1f}, {overloaded.num_refused} refused")
    assert goodput >= 0.9 * peak
    assert overloaded.num_refused > 7 * len(overloaded.answered)
