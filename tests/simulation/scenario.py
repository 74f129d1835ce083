"""What one seed chooses before the first step: sizes, limits, load, and which faults happen how often."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.state import ModelLimits
from tests.simulation.model import EOS, VOCAB
from tests.simulation.shard import StepFaults

# Of prompt and answer.
LONGEST = 64
# Seconds of the slowest step that is not slow on purpose, and of the longest way through a socket.
LONGEST_STEP = 0.03
LONGEST_DELAY = 0.005
LONGEST_PAUSE = 3.0
LONGEST_STALL = 2.0
LONGEST_START = 5.0
# Seconds that a request takes when it is alone, about: what the load is measured by.
SERVICE_TIME = 0.4


@dataclass(slots=True)
class Rates:
    """Faults per second, until the faults stop."""

    death: float = 0.0
    hang: float = 0.0
    disconnect: float = 0.0
    pause: float = 0.0
    # Probabilities: that a link to a worker stalls, for each message; of a step that takes almost as long as a hang;
    # that new shards fail, before they are connected or soon after; that they have fewer blocks; that a client cancels.
    stall: float = 0.0
    slow_step: float = 0.0
    failed_start: float = 0.0
    early_death: float = 0.0
    fewer_blocks: float = 0.0
    cancel: float = 0.0
    steps: StepFaults = field(default_factory=StepFaults)

    def stop(self) -> None:
        self.death = self.hang = self.disconnect = self.pause = 0.0
        self.stall = self.slow_step = self.failed_start = self.early_death = self.fewer_blocks = 0.0
        self.steps.out_of_memory = self.steps.row_error = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    limits: SchedulerLimits
    rates: Rates
    num_requests: int
    num_workers: int
    tenants: tuple[str, ...]
    hang_timeout: float
    max_restarts: int
    # Seconds between requests, on average, and how many of them come at once at most.
    gap: float
    burst: int
    # Seconds from SIGTERM to the end; None: there is none before all requests are answered.
    grace: float | None
    # Tokens that prompts are made of: with few of them, many prompts begin alike.
    letters: int

    @property
    def model_limits(self) -> ModelLimits:
        limits = self.limits
        return ModelLimits(LONGEST - 1, LONGEST, limits.max_tokens, VOCAB, limits.block_size, limits.eos_token_ids)


def draw(rng: random.Random) -> Scenario:
    block_size = rng.choice((1, 2, 4, 4, 8, 16))
    max_rows = rng.randint(1, 8)
    # From just enough for one request to enough for all.
    num_blocks = 1 + rng.randint(LONGEST, LONGEST * rng.randint(1, max_rows)) // block_size + 1
    has_encoder = rng.random() < 0.08
    # Whole prompts must fit beside the decodes.
    step_tokens = max_rows + rng.choice((1, 4, 16, 64)) + (LONGEST if has_encoder else 0)
    max_requests = rng.choice((None, 4, 16, 64))
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_rows=max_rows,
        max_step_tokens=step_tokens,
        eos_token_ids=EOS,
        prefix_caching=not has_encoder and rng.random() < 0.85,
        max_prompt_tokens=None if has_encoder else rng.choice((None, None, 8)),
        max_mixed_tokens=rng.choice((None, max(1, step_tokens // 2))),
        mixed_step_time=rng.choice((None, 0.01)),
        waiting_served_ratio=0.3,
        queue_timeout=rng.choice((0, 0, 0, 0.3, 2)),
        request_timeout=rng.choice((0, 0, 0, 0.5, 4)),
        max_requests=max_requests,
        max_queued_tokens=rng.choice((None, None, 100, 1000)),
        share_prefix_cache=rng.random() < 0.3,
        decoder_start_token_id=1 if has_encoder else None,
        speculate=0 if has_encoder else rng.choice((0, 1, 4, 16)),
        vocab_size=VOCAB,
    )
    limits = beyond_one_device(limits, random.Random(rng.random()))
    burst = rng.choice((1, 1, 4, 40))
    return Scenario(
        limits=limits,
        rates=draw_rates(rng),
        num_requests=rng.randint(50, 500),
        num_workers=rng.randint(1, 3),
        tenants=rng.choice((("",), ("a", "b"), ("a", "b", "c"))),
        hang_timeout=rng.choice((2.0, 10.0, 30.0)),
        max_restarts=rng.choice((2, 100, 100)),
        gap=(1 + burst) / 2 * SERVICE_TIME / max_rows / rng.choice((0.3, 0.7, 1.0, 3.0)),
        burst=burst,
        grace=rng.choice((None, None, None, None, 0.0, 2.0)),
        letters=min(rng.choice((1, 2, 20)), 1 if limits.num_host_blocks else VOCAB),
    )


def beyond_one_device(limits: SchedulerLimits, rng: random.Random) -> SchedulerLimits:
    """Host memory for blocks of evicted prefixes; stages of a pipeline, which has neither drafts nor encoders."""
    if limits.prefix_caching and rng.random() < 0.4:
        num_blocks = LONGEST // limits.block_size + 3  # which one request fills
        num_host_blocks = rng.choice((4, num_blocks, 4 * num_blocks))
        limits = replace(limits, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    if not limits.speculate and limits.decoder_start_token_id is None and rng.random() < 0.4:
        limits = replace(limits, num_stages=rng.choice((2, 3, 4)))
    return limits


def draw_rates(rng: random.Random) -> Rates:
    """Each seed has some faults and not others: what happens rarely together is found that way."""

    def sometimes(*choices: float) -> float:
        return rng.choice(choices) if rng.random() < 0.4 else 0.0

    return Rates(
        death=sometimes(0.05, 0.5, 2.0),
        hang=sometimes(0.05, 0.3),
        disconnect=sometimes(0.1, 1.0),
        pause=sometimes(0.1, 2.0),
        stall=sometimes(0.0005, 0.01),
        slow_step=sometimes(0.002, 0.02),
        failed_start=sometimes(0.2, 0.6),
        early_death=sometimes(0.2, 0.8),
        fewer_blocks=sometimes(0.2),
        cancel=sometimes(0.05, 0.5),
        steps=StepFaults(sometimes(0.002, 0.02), sometimes(0.01, 0.1)),
    )
