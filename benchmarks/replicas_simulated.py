"""A hundred replicas, simulated: the balancer's own choice (`balancer/choosing.py`, `balancer/prefixes.py`), and
replicas that are numbers.

    python -m benchmarks.replicas_simulated --out benchmarks/results/replicas-simulated.json

A replica computes prompts one after the other at a rate and decodes all its rows in steps whose time grows with their
number; both are what one H200 was measured at with Llama-3.1-8B's shape (G1, G2 and G3 of
`benchmarks/results/engine-h200-llama-8b.json`). Its cache holds as many tokens as there, least recently used first.
Users are conversations: each begins with the system prompt of one of 50 applications, some of which are far more
popular than others, asks, reads, and asks again. Left out: networks, preemption, replicas that fail.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from legato.balancer.choosing import Load, cheapest
from legato.balancer.prefixes import TOKENS_PER_CHUNK, PrefixIndex
from legato.benchmark.report import environment, percentile, write_json

# Measured: see above.
PROMPT_RATE = 44_000.0
STEP_SECONDS, ROW_SECONDS = 3.7e-3, 23e-6
ROWS, CACHE_TOKENS = 512, 421_000
APPLICATIONS, SYSTEM_TOKENS = 50, 1536
QUESTION_TOKENS, ANSWER_TOKENS, THINK_SECONDS, TURNS = 96, 256, 10.0, 8
POLICIES = ("prefix", "least-load", "round-robin")


@dataclass
class SimulatedReplica:
    num_active: int = 0
    pending_tokens: int = 0
    prompts_done_at: float = 0.0
    cache: PrefixIndex = field(default_factory=PrefixIndex)


@dataclass
class Conversation:
    chain: list[int]
    number: int
    turn: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.chain) * TOKENS_PER_CHUNK


class Simulation:
    def __init__(self, policy: str, num_replicas: int, num_users: int, seed: int = 0) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        self._replicas = [SimulatedReplica() for _ in range(num_replicas)]
        for replica in self._replicas:
            replica.cache.set_capacity(0, CACHE_TOKENS)
        self._index = PrefixIndex()
        for number in range(num_replicas):
            self._index.set_capacity(number, CACHE_TOKENS)
        self._chunks, self._order, self._turns = count(), count(), count()
        self._events: list[tuple[float, int, Any]] = []
        self._systems = [self._new_chunks(SYSTEM_TOKENS) for _ in range(APPLICATIONS)]
        self._weights = [1 / (rank + 1) for rank in range(APPLICATIONS)]
        self.first_tokens: list[float] = []
        self.num_prompt = self.num_hit = self.num_out = 0
        self.most_active = 0
        self.choice_seconds = 0.0
        for _ in range(num_users):
            self._push(self._random.expovariate(1 / THINK_SECONDS), self._new_user())

    def _new_chunks(self, num_tokens: int) -> list[int]:
        return [next(self._chunks) for _ in range(num_tokens // TOKENS_PER_CHUNK)]

    def _new_user(self) -> Conversation:
        (system,) = self._random.choices(self._systems, self._weights)
        return Conversation(list(system), next(self._order))

    def _push(self, at: float, event: Any) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def run(self, seconds: float, warm: float) -> None:
        """What happens before `warm` is not counted: caches are empty at first."""
        while self._events and self._events[0][0] < seconds:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, Conversation):
                self._ask(event, now, is_counted=now > warm)
            else:
                event(now)

    def _choose(self, conversation: Conversation) -> tuple[int, int]:
        """A replica, and how many tokens the balancer thinks that it has to compute."""
        started = time.process_time()
        turn = next(self._turns) % len(self._replicas)
        if self._policy == "round-robin":
            return turn, conversation.num_tokens
        cached = [0] * len(self._replicas)
        if self._policy == "prefix":
            for number, depth in self._index.match(conversation.chain).items():
                cached[number] = depth * TOKENS_PER_CHUNK
        loads = [Load(each.num_active, each.pending_tokens, ROWS) for each in self._replicas]
        chosen = cheapest(loads, conversation.num_tokens, cached, turn)
        self._index.add(chosen, conversation.chain)
        self.choice_seconds += time.process_time() - started
        return chosen, max(0, conversation.num_tokens - cached[chosen])

    def _ask(self, conversation: Conversation, now: float, *, is_counted: bool) -> None:
        conversation.chain += self._new_chunks(QUESTION_TOKENS)
        chosen, num_new = self._choose(conversation)
        replica = self._replicas[chosen]
        num_tokens = conversation.num_tokens
        hit = replica.cache.match(conversation.chain).get(0, 0) * TOKENS_PER_CHUNK
        replica.num_active += 1
        replica.pending_tokens += num_new
        done = max(now, replica.prompts_done_at) + (num_tokens - hit) / PROMPT_RATE
        replica.prompts_done_at = done
        first = done + STEP_SECONDS + ROW_SECONDS * replica.num_active
        if is_counted:
            self.first_tokens.append(first - now)
            self.num_prompt += num_tokens
            self.num_hit += hit
            self.num_out += ANSWER_TOKENS
            self.most_active = max(self.most_active, replica.num_active)
        conversation.chain += self._new_chunks(ANSWER_TOKENS)

        def begin(now: float) -> None:
            replica.pending_tokens -= num_new
            replica.cache.add(0, conversation.chain)
            step = STEP_SECONDS + ROW_SECONDS * replica.num_active
            self._push(now + step * ANSWER_TOKENS, end)

        def end(now: float) -> None:
            replica.num_active -= 1
            conversation.turn += 1
            user = conversation if conversation.turn < TURNS else self._new_user()
            self._push(now + self._random.expovariate(1 / THINK_SECONDS), user)

        self._push(first, begin)


def measure(policy: str, options: argparse.Namespace) -> dict[str, Any]:
    simulation = Simulation(policy, options.replicas, options.users)
    simulation.run(options.seconds, options.seconds / 3)
    times, num = sorted(simulation.first_tokens), len(simulation.first_tokens)
    return {
        "requests": num,
        "hit_rate": round(simulation.num_hit / simulation.num_prompt, 4),
        "first_token_ms": {f"p{each}": round(percentile(times, each) * 1000, 1) for each in (50, 99)},
        "tokens_per_second": round(simulation.num_out / (options.seconds * 2 / 3)),
        "most_requests_on_one_replica": simulation.most_active,
        "choice_us": round(simulation.choice_seconds / next(simulation._turns) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Many replicas, simulated.")
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--users", type=int, default=20_000, help="conversations at once, most of them reading")
    parser.add_argument("--seconds", type=float, default=90.0, help="of simulated time")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    figures: dict[str, Any] = {"replicas": options.replicas, "users": options.users}
    for policy in POLICIES:
        figures[policy] = measure(policy, options)
        print(policy, json.dumps(figures[policy]), flush=True)
    if options.out:
        write_json(options.out, {**figures, **environment()})


if __name__ == "__main__":
    main()
