"""A request inside the scheduler, and a step between its plan and its result.

entry.tokens             ├────── prompt ──────┼── generated ──┤
entry.num_known          ├────────────────────────────────────┼┤   those and one for each step that will sample
entry.num_scheduled      ├──────────────────────────────┤          keys and values computed or being computed
blocks in the tree       ├────────────────────────┤                full blocks whose results have arrived
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.prefix_tree import Node, PrefixTree
from legato.scheduling.queue import Rank, Tenant
from legato.scheduling.state import Admission, FinishReason, GenerationRequest, Output, StepPlan, StepResult

if TYPE_CHECKING:
    from legato.scheduling.drafting import RequestDrafts

NEVER = sys.maxsize
NO_DRAFTS: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Entry:
    """It has a row and blocks while it runs, and neither while it waits."""

    request: GenerationRequest
    id: int
    rank: Rank
    tenant: Tenant
    tokens: array[int]  # 64 bits each: digests of images are larger than any token id
    num_prompt: int
    max_len: int  # of prompt and answer
    first_len: int  # with the first token that is generated here
    end_ids: frozenset[int]  # tokens that may end it
    num_known: int = 0
    num_scheduled: int = 0
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0  # tokens for which it has blocks
    private: set[int] = field(default_factory=set)  # blocks that are not in the tree: ours to free
    node: Node | None = None  # deepest tree node we hold
    num_indexed: int = 0  # leading blocks that were offered to the tree
    full_at: int = NEVER  # tokens at which the next block is full and can be offered
    epoch: int = 0  # counts admissions: results of an earlier stay say nothing about this one's blocks
    num_cached: int = 0  # prompt tokens that were in the tree when it was admitted for the first time
    queued_at: float = 0.0  # when it was submitted
    queue_time: float = 0.0  # seconds until it was admitted for the first time
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_tokens: list[list[tuple[int, float]]] = field(default_factory=list)
    done: bool = False
    wholes: tuple[tuple[int, int], ...] = ()  # [begin, end) of tokens that one step must compute together, in order
    num_losses: int = 0  # of the shards, in a row, in steps that would have given it the token after `lost_at` others
    lost_at: int = 0
    last_step: int = 0  # that decoded it, in a pipeline
    drafts: RequestDrafts | None = None  # what guesses at its next tokens are made of; only with speculation

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        rank: Rank,
        tenant: Tenant,
        limits: SchedulerLimits,
        now: float,
    ) -> Entry:
        """The token with which the decoder of an encoder-decoder model begins stands behind what the encoder reads."""
        tokens, model_ends = array("q", request.input_ids), limits.eos_token_ids
        if limits.decoder_start_token_id is not None:
            tokens.append(limits.decoder_start_token_id)
        num_prompt = len(tokens)
        tokens.extend(request.emitted_ids)
        wholes: tuple[tuple[int, int], ...] = ((0, num_prompt),) if limits.has_whole_prompts else ()
        if limits.whole_images:
            wholes = tuple((image.start, image.start + image.num_tokens) for image in request.images)
        return cls(
            request=request,
            id=request.id,
            rank=rank,
            tenant=tenant,
            tokens=tokens,
            num_prompt=num_prompt,
            max_len=num_prompt + request.max_new_tokens,
            first_len=len(tokens) + 1,
            end_ids=request.stop_token_ids if request.ignore_eos else model_ends | request.stop_token_ids,
            num_known=len(tokens),
            wholes=wholes,
            queued_at=now,
        )

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that steps in flight will sample: they count, but are not known yet."""
        return self.num_known - len(self.tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They need the logits of every prompt token, so nothing of the prompt may come from the cache."""
        return self.request.prompt_logprobs and self.num_generated == 0

    @property
    def num_to_compute(self) -> int:
        """Known tokens without keys and values yet. None once the last token is coming."""
        return 0 if self.num_known >= self.max_len else self.num_known - self.num_scheduled

    def next_block(self, node: Node | None, depth: int, size: int) -> tuple[int, bytes] | None:
        """Names the block of `size` tokens below `node`, which is `depth` blocks deep, by its tokens, if all of them
        are known. None also if the size is 0: then blocks are not shared."""
        start = depth * size
        if start + size >= len(self.tokens) or not size:
            return None
        return id(node), self.tokens[start : start + size].tobytes()

    def fits(self, limits: SchedulerLimits) -> bool:
        """Whether it can be computed when it is alone. Its last token is never computed: that of a decoder's start
        takes its place."""
        longest = len(self.request.input_ids) + self.request.max_new_tokens
        room = limits.max_step_tokens - limits.max_rows + 1  # beside all decodes
        return longest <= limits.max_tokens and max((end - begin for begin, end in self.wholes), default=1) <= room

    def cut(self, start: int, count: int, most: int) -> int:
        """How many of `count` tokens from `start` on a step may compute without cutting what must be whole: fewer, or
        up to `most`. 0: it has to wait for another step."""
        for first, last in self.wholes:
            if first < start + count < last:
                return first - start if first > start else last - start if last - start <= most else 0
        return count

    def take_row(self, row: int, node: Node, blocks: list[int], limits: SchedulerLimits) -> None:
        """It begins to run, with what the tree has of its tokens, down to `node`."""
        size = limits.block_size
        self.row, self.node, self.blocks, self.num_indexed = row, node, blocks, len(blocks)
        self.num_scheduled = self.capacity = len(blocks) * size
        self.full_at = self.capacity + size if limits.prefix_caching else NEVER
        self.prompt_logprobs, self.prompt_top_tokens = [None], []

    def admission(self) -> Admission:
        """What the shards must know of it when it enters its row."""
        assert self.row is not None
        tokens, cached = self.tokens[:], self.num_scheduled
        return Admission(self.row, self.request, tokens, self.num_generated, cached, list(self.blocks))

    def add_blocks(self, fresh: list[int], block_size: int) -> None:
        self.blocks.extend(fresh)
        self.private.update(fresh)
        self.capacity = len(self.blocks) * block_size

    def offer_blocks(self, tree: PrefixTree, num_computed: int, block_size: int) -> None:
        """Those that are full and computed, to the tree."""
        while self.full_at <= num_computed:
            block = self.blocks[self.num_indexed]
            assert self.node is not None
            key = self.tokens[self.full_at - block_size : self.full_at].tobytes()
            self.node, taken = tree.extend(self.node, key, block)
            if taken:
                self.private.remove(block)
            self.num_indexed += 1
            self.full_at += block_size

    def forget_row(self) -> None:
        """It waits again, and everything it knows is to be computed."""
        self.row = self.node = self.drafts = None
        self.blocks, self.private = [], set()
        self.num_scheduled = self.num_indexed = self.capacity = 0

    def count_loss(self) -> int:
        """The shards were lost in a step that computes it. Returns how often, in a row, without a token in between."""
        self.num_losses = self.num_losses + 1 if self.lost_at == len(self.tokens) else 1
        self.lost_at = len(self.tokens)
        return self.num_losses

    def book_scores(self, row: int, result: StepResult) -> None:
        """Of its prompt. Also if it was preempted since: its first token may be in this very result."""
        self.prompt_logprobs.extend(result.prompt_logprobs.get(row, ()))
        self.prompt_top_tokens.extend(result.prompt_top_tokens.get(row, ()))

    def count_drafts(self, num_accepted: int) -> None:
        """So many drafts of the step whose result is here were right: they are known and computed."""
        self.num_known += num_accepted
        self.num_scheduled += num_accepted

    def tell_about_prompt(self, output: Output) -> None:
        """Comes with the first token."""
        output.num_cached, output.queue_time = min(self.num_cached, self.num_prompt), self.queue_time
        if self.request.prompt_logprobs:  # nothing predicts what an encoder reads
            unknown = len(self.request.input_ids) - len(self.prompt_logprobs)
            output.prompt_logprobs = self.prompt_logprobs + [None] * unknown
        if self.prompt_top_tokens:
            output.prompt_top_tokens = [None, *self.prompt_top_tokens]

    def finish_reason(self, token: int, model_ends: frozenset[int]) -> FinishReason | None:
        """Whether `token`, the last one, ends it."""
        request, num_generated = self.request, self.num_generated
        if num_generated > request.min_new_tokens:
            if token in model_ends and not request.ignore_eos:
                return FinishReason.EOS_TOKEN
            if token in request.stop_token_ids:
                return FinishReason.STOP_SEQUENCE
        return FinishReason.LENGTH if num_generated >= request.max_new_tokens else None


# What one plan may spend on admissions, in blocks that are looked up: some 3 ms. Requests with long cached prefixes are
# admitted over several plans, instead of holding up the router's event loop and every token that is on its way.
MAX_ADMISSION_WORK = 4096
ENTRY_WORK = 24  # of each request that is considered, besides its blocks
RETURN_WORK = 4  # of each block that comes back from host memory and takes the place of another
# What must be remembered of a row that was sent off: the entry and its epoch, how many tokens are computed once the
# step is done, and whether it samples one. A tuple, because one is made for every row of every step.
PlannedRow = tuple[Entry, int, int, bool]


@dataclass(slots=True)
class InFlight:
    """`planned` runs in parallel with the plan's rows."""

    plan: StepPlan
    planned: list[PlannedRow] = field(default_factory=list)
    # What its prompt tokens come to beside decodes, in tokens without a context; 0 if it has only one of the two.
    mixed_units: float = 0.0
    # What was spent on admissions, in blocks that were looked up.
    work: int = 0
    # Tokens that fit into the step beyond its budget, for what must not be cut.
    spare: int = 0

    def add(self, entry: Entry, count: int, new_blocks: list[int], drafts: Sequence[int] = NO_DRAFTS) -> None:
        """It computes `count` more tokens of an entry that has a row, and verifies these drafts behind them."""
        plan = self.plan
        assert entry.row is not None
        entry.num_scheduled = end = entry.num_scheduled + count
        samples = end == entry.num_known
        entry.num_known += samples
        if drafts:
            plan.drafts[entry.row] = list(drafts)
            count += len(drafts)
        plan.rows.append(entry.row)
        plan.num_tokens.append(count)
        plan.new_blocks.append(new_blocks)
        self.planned.append((entry, entry.epoch, end, samples))

    @property
    def may_look_up(self) -> bool:
        return self.work < MAX_ADMISSION_WORK

    def look_up(self, num_blocks: int, num_returning: int) -> None:
        """A request of so many blocks is considered for admission, of which some would come back from host memory."""
        self.work += ENTRY_WORK + num_blocks + RETURN_WORK * num_returning
