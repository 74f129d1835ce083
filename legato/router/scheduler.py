"""The scheduler: decides what every step computes. Plain data in, plain data out; no clock, no I/O, no torch.

A request is an `Entry` with known tokens and computed tokens; a step computes some of the difference. The loop around
it (`backend.py`) is: plan a step, send it, and when its result arrives, complete it. Up to two plans are in flight.

    entry.tokens             ├────── prompt ──────┼── generated ──┤
    entry.num_pending                                             ├┤   sampled by steps in flight, value not here yet
    entry.num_scheduled      ├──────────────────────────────┤          keys and values computed or being computed
    entry.num_computed       ├───────────────────────────┤             ... of which the results have arrived
    blocks in the tree       ├────────────────────────┤                full blocks of those

Order is fairness: `running` is sorted by arrival, the oldest is served first and the youngest is preempted first, so
the oldest always gets through.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from legato.router.blocks import BlockPool
from legato.router.prefix_tree import Node, PrefixTree
from legato.router.queue import Queue
from legato.router.state import Admission, FinishReason, GenerationRequest, Output, StepPlan, StepResult

# Waiting requests that one plan looks at: those behind may have a cached prefix when the first ones have not.
LOOK_AHEAD = 32


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    num_blocks: int
    block_size: int
    max_rows: int
    # Tokens of one step, prompt chunks and decodes together.
    max_step_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    prefix_caching: bool = True

    @property
    def max_tokens(self) -> int:
        """The longest sequence that fits when it is alone."""
        return BlockPool(self.num_blocks).total * self.block_size


@dataclass(slots=True, eq=False)
class Entry:
    """A request inside the scheduler. It has a row and blocks while it runs, and neither while it waits."""

    request: GenerationRequest
    arrival: int
    tokens: list[int]
    num_pending: int = 0
    num_scheduled: int = 0
    num_computed: int = 0
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    private: set[int] = field(default_factory=set)  # blocks that are not in the tree: ours to free
    node: Node | None = None  # deepest tree node we hold
    num_indexed: int = 0  # leading blocks that were offered to the tree
    epoch: int = 0  # counts admissions: results of an earlier stay say nothing about this one's blocks
    num_cached: int = 0  # prompt tokens that were in the tree when it was admitted for the first time
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_tokens: list[list[tuple[int, float]]] = field(default_factory=list)
    done: bool = False

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def num_prompt(self) -> int:
        return len(self.request.input_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They need the logits of every prompt token, so nothing of the prompt may come from the cache."""
        return self.request.prompt_logprobs and self.num_generated == 0

    @property
    def num_to_compute(self) -> int:
        """Known tokens, pending ones included, without keys and values yet. None once the last token is coming."""
        if self.num_generated + self.num_pending >= self.request.max_new_tokens:
            return 0
        return len(self.tokens) + self.num_pending - self.num_scheduled


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """What `complete` must remember of a row that was sent off."""

    entry: Entry
    epoch: int
    row: int
    end: int  # tokens computed once this step is done
    samples: bool


@dataclass(slots=True)
class SchedulerStats:
    """Plain numbers; the router's metrics read them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        assert limits.max_step_tokens >= limits.max_rows, "every running request must fit in a step"
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.tree = PrefixTree(limits.block_size)
        self.queue: Queue[Entry] = Queue()
        self.running: list[Entry] = []
        self.stats = SchedulerStats()
        self.max_running_tokens = 0  # what the running requests hold or may still come to
        self._entries: dict[int, Entry] = {}
        self._free_rows = list(range(limits.max_rows))
        self._in_flight: deque[tuple[int, list[PlannedRow]]] = deque()
        self._step_ids = itertools.count(1)
        self._arrivals = itertools.count()

    # ---- requests come and go -------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        assert request.id not in self._entries, f"request {request.id} is here already"
        assert request.input_ids, "a prompt has at least one token"
        longest = len(request.input_ids) + request.max_new_tokens
        assert longest <= self.limits.max_tokens, f"{longest} tokens can never fit"
        entry = Entry(request, next(self._arrivals), list(request.input_ids))
        self._entries[request.id] = entry
        self.queue.push(entry)

    def cancel(self, request_id: int) -> None:
        """Forget a request at once. Steps run in order, so its row and blocks may be reused by the very next plan."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._finish(entry)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that requests use; cached ones that nobody uses are as good as free."""
        return 1 - (self.pool.available + self.tree.num_evictable) / self.pool.total

    # ---- plan a step ----------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """What the next step computes, or None if there is nothing to do."""
        plan = StepPlan(next(self._step_ids), [], [], [], [])
        planned: list[PlannedRow] = []
        budget = self._plan_running(plan, planned)
        self._plan_admissions(plan, planned, budget)
        if not planned:
            return None
        self._in_flight.append((plan.id, planned))
        return plan

    def _plan_running(self, plan: StepPlan, planned: list[PlannedRow]) -> int:
        """Oldest first. Every decode keeps its token; prompt chunks share what is left. Returns the rest."""
        decodes_ahead = sum(entry.num_to_compute == 1 for entry in self.running)
        budget = self.limits.max_step_tokens
        for entry in list(self.running):
            wanted = entry.num_to_compute
            if wanted == 0 or entry.row is None:  # no row: preempted by an older one in this very loop
                continue
            if wanted == 1:
                decodes_ahead -= 1
            count = min(wanted, budget - decodes_ahead)
            if count <= 0:
                continue
            first_new = len(entry.blocks)
            if self._grow(entry, count):
                budget -= count
                self._add(plan, planned, entry, count, entry.blocks[first_new:])
        return budget

    def _plan_admissions(self, plan: StepPlan, planned: list[PlannedRow], budget: int) -> None:
        if not self.queue:
            return
        filling = {self._next_block(entry, entry.node, entry.num_indexed) for entry in self.running}
        for entry in list(itertools.islice(self.queue.entries(), LOOK_AHEAD)):
            if budget == 0 or not self._free_rows:
                return
            if entry.num_pending:
                continue  # preempted, and its last token is still on the way
            node, blocks = self._cached_prefix(entry)
            upcoming = self._next_block(entry, node, len(blocks))
            if upcoming is not None and upcoming in filling and not entry.wants_prompt_logprobs:
                continue  # somebody is computing what comes next: in a moment it is there for the taking
            if not self._admit(plan, entry, node, blocks):
                return  # it waits for memory, and nobody overtakes it there
            count = min(entry.num_to_compute, budget)
            first_new = len(entry.blocks)
            fits = self._grow(entry, count)
            assert fits, "_admit counted the blocks"
            budget -= count
            self._add(plan, planned, entry, count, entry.blocks[first_new:])
            filling.add(upcoming)

    def _add(self, plan: StepPlan, planned: list[PlannedRow], entry: Entry, count: int, new_blocks: list[int]) -> None:
        assert entry.row is not None
        samples = count == entry.num_to_compute
        entry.num_scheduled += count
        entry.num_pending += samples
        plan.rows.append(entry.row)
        plan.num_tokens.append(count)
        plan.new_blocks.append(new_blocks)
        planned.append(PlannedRow(entry, entry.epoch, entry.row, entry.num_scheduled, samples))

    def _cached_prefix(self, entry: Entry) -> tuple[Node, list[int]]:
        """Some token must always be computed, to get logits at all."""
        reusable = (len(entry.tokens) - 1) // self.limits.block_size
        if not self.limits.prefix_caching or entry.wants_prompt_logprobs:
            reusable = 0
        return self.tree.match(entry.tokens, reusable)

    def _next_block(self, entry: Entry, node: Node | None, depth: int) -> tuple[int, tuple[int, ...]] | None:
        """Names the block below `node`, which is `depth` blocks deep, by the entry's tokens, if it knows them all."""
        start, size = depth * self.limits.block_size, self.limits.block_size
        if not self.limits.prefix_caching or start + size >= len(entry.tokens):
            return None
        return id(node), tuple(entry.tokens[start : start + size])

    def _admit(self, plan: StepPlan, entry: Entry, node: Node, blocks: list[int]) -> bool:
        """Give a request a row and the cached part of its tokens, if the rest has a chance to fit."""
        tokens, size = entry.tokens, self.limits.block_size
        self.tree.lock(node)
        missing = -(-len(tokens) // size) - len(blocks)
        headroom = len(self.running)  # a block each, or the newcomer would be preempted at once
        if missing + headroom > self.pool.available + self.tree.num_evictable:
            self.tree.unlock(node)
            return False
        self.queue.pop(entry.id)
        entry.row = heapq.heappop(self._free_rows)
        entry.node, entry.blocks, entry.num_indexed = node, blocks, len(blocks)
        entry.num_scheduled = entry.num_computed = len(blocks) * size
        if entry.epoch == 0:
            entry.num_cached = entry.num_scheduled
        entry.epoch += 1
        entry.prompt_logprobs, entry.prompt_top_tokens = [None], []
        bisect.insort(self.running, entry, key=lambda running: running.arrival)
        self.max_running_tokens += entry.num_prompt + entry.request.max_new_tokens
        self.stats.prompt_tokens += len(tokens)
        self.stats.cached_tokens += entry.num_scheduled
        plan.admitted.append(
            Admission(entry.row, entry.request, list(tokens), entry.num_generated, entry.num_scheduled, list(blocks))
        )
        return True

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _grow(self, entry: Entry, count: int) -> bool:
        """Blocks for `count` more tokens of `entry`; evicts, then preempts younger requests. False: it lost its own."""
        missing = -(-(entry.num_scheduled + count) // self.limits.block_size) - len(entry.blocks)
        while missing > self.pool.available:
            evicted = self.tree.evict(missing - self.pool.available)
            self.pool.free(evicted)
            if missing > self.pool.available:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is entry:
                    return False
        if missing > 0:
            fresh = self.pool.allocate(missing)
            entry.blocks.extend(fresh)
            entry.private.update(fresh)
        return True

    def _preempt(self, entry: Entry) -> None:
        self.stats.preemptions += 1
        self._release(entry)
        self.queue.push_front(entry)

    def _release(self, entry: Entry) -> None:
        """Take back the row and the blocks. What the tree holds of them stays there, now evictable."""
        assert entry.row is not None and entry.node is not None
        heapq.heappush(self._free_rows, entry.row)
        self.pool.free(sorted(entry.private))
        self.tree.unlock(entry.node)
        self.running.remove(entry)
        self.max_running_tokens -= entry.num_prompt + entry.request.max_new_tokens
        entry.row = entry.node = None
        entry.blocks, entry.private = [], set()
        entry.num_scheduled = entry.num_computed = entry.num_indexed = 0

    def _finish(self, entry: Entry) -> None:
        entry.done = True
        del self._entries[entry.id]
        if entry.row is not None:
            self._release(entry)
        else:
            self.queue.pop(entry.id)

    # ---- a result arrives -----------------------------------------------------------------------------------------

    def complete(self, result: StepResult) -> list[tuple[int, Output]]:
        """Book the result of the oldest plan in flight. Returns what each request gets to see."""
        step_id, planned = self._in_flight.popleft()
        assert step_id == result.id, f"result of step {result.id}, expected {step_id}"
        if result.error is not None:
            return self._fail(planned, result.error)
        outputs: list[tuple[int, Output]] = []
        index = 0
        for row in planned:
            entry = row.entry
            if not entry.done:
                self._book_computed(row, result)
            if row.samples:
                if not entry.done:
                    outputs.append((entry.id, self._book_sampled(entry, index, result)))
                index += 1
        assert index == len(result.token_ids), f"{len(result.token_ids)} tokens for {index} rows"
        return outputs

    def _book_computed(self, row: PlannedRow, result: StepResult) -> None:
        entry = row.entry
        if row.epoch != entry.epoch:
            return
        if entry.request.prompt_logprobs:  # also of one preempted since: its first token may be in this very result
            entry.prompt_logprobs.extend(result.prompt_logprobs.get(row.row, ()))
            entry.prompt_top_tokens.extend(result.prompt_top_tokens.get(row.row, ()))
        if entry.row is None:
            return
        entry.num_computed = row.end
        if self.limits.prefix_caching:
            self._index(entry)

    def _index(self, entry: Entry) -> None:
        """Offer the blocks that are full and computed to the tree."""
        size = self.limits.block_size
        while (entry.num_indexed + 1) * size <= entry.num_computed:
            start = entry.num_indexed * size
            block = entry.blocks[entry.num_indexed]
            assert entry.node is not None
            entry.node, taken = self.tree.extend(entry.node, tuple(entry.tokens[start : start + size]), block)
            if taken:
                entry.private.remove(block)
            entry.num_indexed += 1

    def _book_sampled(self, entry: Entry, index: int, result: StepResult) -> Output:
        """A row may fail alone, if its grammar does."""
        if (error := result.row_errors.get(index)) is None:
            return self._book_token(entry, index, result)
        self._finish(entry)
        return Output(error=error)

    def _book_token(self, entry: Entry, index: int, result: StepResult) -> Output:
        token = result.token_ids[index]
        entry.num_pending -= 1
        entry.tokens.append(token)
        output = Output(token, result.logprobs[index], result.top_tokens.get(index))
        if entry.num_generated == 1:
            output.num_cached = entry.num_cached
            if entry.request.prompt_logprobs:
                output.prompt_logprobs = entry.prompt_logprobs
            if entry.prompt_top_tokens:
                output.prompt_top_tokens = [None, *entry.prompt_top_tokens]
        output.finish_reason = self._finish_reason(entry, token)
        if output.finish_reason is not None:
            self._finish(entry)
        return output

    def _finish_reason(self, entry: Entry, token: int) -> FinishReason | None:
        request, num_generated = entry.request, entry.num_generated
        if num_generated > request.sampling.min_new_tokens:
            if token in self.limits.eos_token_ids and not request.ignore_eos:
                return FinishReason.EOS_TOKEN
            if token in request.stop_token_ids:
                return FinishReason.STOP_SEQUENCE
        return FinishReason.LENGTH if num_generated >= request.max_new_tokens else None

    def _fail(self, planned: list[PlannedRow], error: str) -> list[tuple[int, Output]]:
        failed = []
        for row in planned:
            if not row.entry.done:
                self._finish(row.entry)
                failed.append((row.entry.id, Output(error=error)))
        return failed
