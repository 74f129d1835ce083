"""The scheduler's limits: blocks, rows, tokens per step, time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from legato.scheduling.blocks import RESERVED_BLOCKS
from legato.scheduling.budget import StepSizes

# Positions at which a step of any number of rows may sample, drafts included.
FEWEST_SAMPLED = 256
# Waiting requests that one plan passes over: those behind may have a cached prefix when the first ones have not.
LOOK_AHEAD = 32
# Losses of the shards in a row, without a token in between, that a request survives: it may be what they die of.
MAX_LOSSES = 2


def most_sampled(max_rows: int) -> int:
    """Positions at which one step may sample if decodes have drafts. Warm-up leaves memory for as many."""
    return max(max_rows, FEWEST_SAMPLED)


class Refusal:
    """Why a request ends without its last token."""

    OVERLOADED = "Model is overloaded"
    WAITED_TOO_LONG = "The request waited longer than {:g} seconds for its turn (--queue-timeout)"
    RAN_TOO_LONG = "The request took longer than {:g} seconds (--request-timeout)"
    DOES_NOT_FIT = "The request needs more memory than the shards have since they were restarted"
    UNKNOWN_ADAPTER = "The adapter of the request is not loaded any more"
    LOST_TOO_OFTEN = "The shards failed {} times while they computed this request"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    num_blocks: int
    block_size: int
    max_rows: int
    # Tokens of one step, prompt chunks and decodes together.
    max_step_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    prefix_caching: bool = True
    # Blocks that the prefix tree may keep although no request uses them. None: no limit.
    max_unused_blocks: int | None = None
    # Prompt tokens of any step, if that is less.
    max_prompt_tokens: int | None = None
    # Prompt tokens of a step in which others decode, those that steps may grow to, and the seconds such a step should
    # take at most (`budget.py`).
    max_mixed_tokens: int | None = None
    most_mixed_tokens: int | None = None
    mixed_step_time: float | None = None
    waiting_served_ratio: float = math.inf
    # Seconds until a request must have a row, and until it must have ended. 0: no limit.
    queue_timeout: float = 0
    request_timeout: float = 0
    # Requests that run or wait, and prompt tokens that wait; more are refused. None: no limit.
    max_requests: int | None = None
    max_queued_tokens: int | None = None
    # Whether tenants find each other's prompts in the prefix tree.
    share_prefix_cache: bool = False
    # Drafts of a row in a step (`drafting.py`), and the tokens that they may be.
    speculate: int = 0
    # Guesses that the shards can make themselves, behind what they have sampled.
    num_proposals: int = 0
    vocab_size: int = 1 << 31
    # Of an encoder-decoder model: what its decoder sees first.
    decoder_start_token_id: int | None = None
    # Whether prompts are computed whole and never shared, and whether the images in them are computed whole.
    whole_prompts: bool = False
    whole_images: bool = False
    # The shards embed texts: prompts are computed whole, too.
    embeds: bool = False
    # What the device holds of LoRA adapters.
    num_adapter_pages: int = 0
    # Pipeline stages of the shards, each of which computes another step at the same time.
    num_stages: int = 1
    # Slots in host memory for blocks of evicted prefixes.
    num_host_blocks: int = 0

    @property
    def max_tokens(self) -> int:
        """The longest sequence that fits when it is alone."""
        return (self.num_blocks - RESERVED_BLOCKS) * self.block_size

    @property
    def max_in_flight(self) -> int:
        """Steps that are sent and not done: one computes in every stage, and one waits, so that no device waits for the
        router."""
        return self.num_stages + 1

    @property
    def max_sampled(self) -> int:
        return min(most_sampled(self.max_rows), self.max_step_tokens)

    @property
    def has_whole_prompts(self) -> bool:
        """Whether one step must compute all of a prompt, because each of its tokens sees all others."""
        return self.whole_prompts or self.embeds or self.decoder_start_token_id is not None

    @property
    def step_sizes(self) -> StepSizes:
        if self.has_whole_prompts:  # one must fit, also beside decodes
            return StepSizes(self.max_step_tokens, self.max_step_tokens)
        mixed = self.max_step_tokens if self.max_mixed_tokens is None else self.max_mixed_tokens
        return StepSizes(
            self.max_step_tokens, mixed, self.mixed_step_time, max_prompt_tokens=self.max_prompt_tokens,
            most_mixed_tokens=self.most_mixed_tokens, waiting_served_ratio=self.waiting_served_ratio,
        )  # fmt: skip
