"""The scheduler: decides what every step computes. Plain data in, plain data out; no I/O, no torch, and no clock but
the time that its callers tell.

A request is an `Entry` with known tokens and computed tokens; a step computes some of the difference. The loop around
it (`router/step_loop.py`): plan a step, send it, complete it when its result arrives; up to two plans are in flight.

`running` is sorted by rank: the best is served first and the worst is preempted first. Ranks are fixed and newcomers
get worse ones all the time, so every request has the best at last and gets through.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from operator import attrgetter

from legato.scheduling.adapters import AdapterSlots
from legato.scheduling.blocks import BlockPool
from legato.scheduling.budget import Backlog, PromptRoom, StepBudget
from legato.scheduling.deadlines import Deadlines, RequestDeadlines
from legato.scheduling.drafting import Drafter
from legato.scheduling.entry import NO_DRAFTS, Entry, InFlight, PlannedRow
from legato.scheduling.host_blocks import Digest, HostBlocks
from legato.scheduling.limits import LOOK_AHEAD, MAX_LOSSES, Refusal, SchedulerLimits
from legato.scheduling.micro_batches import micro_batch
from legato.scheduling.prefix_tree import Node, PrefixTree
from legato.scheduling.queue import LAST, Queue, Rank, Tenants, rank
from legato.scheduling.retry import RetryEstimate
from legato.scheduling.shares import RequestShares
from legato.scheduling.state import GenerationRequest, Output, SchedulerStats, StepPlan, StepResult

_rank = attrgetter("rank")
NO_BLOCKS: list[int] = []  # of most rows of most steps; never changed


class Scheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        assert limits.max_step_tokens >= limits.max_rows, "every running request must fit in a step"
        assert not (limits.has_whole_prompts and limits.prefix_caching), "what depends on a whole prompt is not shared"
        self.queue: Queue[Entry] = Queue()
        self.stats = SchedulerStats()
        self.adapters = AdapterSlots(limits.num_adapter_pages)
        self._drafter = Drafter()
        self._use(limits)
        self._tenants, self._retry = Tenants(), RetryEstimate()
        self.shares = RequestShares(limits.max_requests, limits.max_queued_tokens)
        self._now = 0.0  # as callers told last
        queue = Deadlines(limits.queue_timeout, Refusal.WAITED_TOO_LONG)
        self._deadlines = RequestDeadlines(queue, Deadlines(limits.request_timeout, Refusal.RAN_TOO_LONG))
        self._entries: dict[int, Entry] = {}
        self._step_ids, self._arrivals = itertools.count(1), itertools.count()

    def _use(self, limits: SchedulerLimits) -> None:
        """Rows and blocks of shards that have computed nothing yet."""
        self.limits = limits
        self.pool, self.tree = BlockPool(limits.num_blocks), PrefixTree(limits.block_size)
        self.host = HostBlocks(limits.num_host_blocks, limits.block_size)
        self.running: list[Entry] = []
        self.max_running_tokens = 0  # what the running requests hold or may still come to
        self._budget = StepBudget(limits.step_sizes)
        self._free_rows = list(range(limits.max_rows))
        self._in_flight: deque[InFlight] = deque()
        self.adapters.reset(limits.num_adapter_pages)
        self._drafter.pace.clear()

    # ---- requests come and go -------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, now: float = 0.0) -> Output | None:
        """Take a valid request, or return why it is refused. `now` is in seconds and never goes back."""
        assert request.id not in self._entries, f"request {request.id} is here already"
        assert request.input_ids, "a prompt has at least one token"
        limits, self._now = self.limits, now
        if request.adapter and request.adapter not in self.adapters.known:
            return Output(error=Refusal.UNKNOWN_ADAPTER, is_unknown=True)
        if not self.shares.take(request):
            return Output(error=Refusal.OVERLOADED, retry_after=self._retry.seconds(1, now))
        if not self._entries:
            self._retry.restart(now)
        order, tenant = rank(now, request.priority, next(self._arrivals)), self._tenants.enter(request.tenant)
        entry = Entry.of(request, order, tenant, limits, now)
        if not entry.fits(limits):
            self._tenants.leave(tenant)
            self.shares.give_back(request, is_queued=True)
            return Output(error=Refusal.DOES_NOT_FIT)
        self._entries[request.id] = entry
        self._deadlines.start(request.id, now)
        self.queue.push(entry)
        return None

    def cancel(self, request_id: int) -> None:
        """Forget a request at once. Steps run in order, so its row and blocks may be reused by the very next plan."""
        if (entry := self._entries.get(request_id)) is not None:
            self._finish(entry)

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do, unless it has ended by then."""
        return self._deadlines.next

    def expire(self, now: float) -> list[tuple[int, Output]]:
        """End the requests whose time is up. Returns what they get to see instead of tokens."""
        self._now = now
        expired: list[tuple[int, Output]] = []
        for request_id, problem in self._deadlines.take_passed(now):
            self._finish(self._entries[request_id])
            expired.append((request_id, Output(error=problem, timed_out=True)))
        return expired

    @property
    def requests(self) -> list[GenerationRequest]:
        """All that run or wait."""
        return [entry.request for entry in self._entries.values()]

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that requests use; unused cached ones are as good as free."""
        return 1 - (self.pool.available + self.tree.num_evictable) / self.pool.total

    def waiting(self) -> list[Entry]:
        """Those in the queue, in no order that means anything."""
        return [self._entries[request_id] for request_id in self.queue]

    # ---- plan a step ----------------------------------------------------------------------------------------------

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """What the next step computes. None if there is nothing to do, or drafts are being verified."""
        if self._in_flight and self._in_flight[-1].plan.is_waited_for:
            return None
        self._now = max(self._now, now)
        step = InFlight(StepPlan(next(self._step_ids), [], [], [], []))
        running = micro_batch(self.running, self.limits.num_stages, step.plan.id)
        wanted = [entry.num_to_compute for entry in running]
        num_decodes = wanted.count(1)
        first = next((entry for entry, count in zip(running, wanted, strict=True) if count > 1), None)
        drafts: dict[int, list[int]] = {}
        if self._may_draft and first is None and not (self.queue and self._free_rows):
            num_spare = self.pool.available + self.tree.num_evictable - len(running)
            drafts = self._drafter.draft(step.plan, running, self.limits, num_spare)
        others = num_decodes + sum(map(len, drafts.values()))
        is_alone = self._tenants.num_present == 1  # no tenant's prompts slow down the streams of another
        backlog = Backlog.of(wanted, len(self.queue), self.shares.queued_work) if is_alone else None
        room = self._budget.room(others, backlog)
        step.spare = self.limits.max_step_tokens - others - room.tokens
        if first is not None:  # a prompt has begun: requests of a better rank come first
            self._plan_admissions(step, room, first.rank)
        self._plan_running(step, running, wanted, room, drafts)
        self._plan_admissions(step, room)
        if not step.planned:
            self.host.cancel()
            return None
        step.plan.copies_out, step.plan.copies_in = self.host.take_copies()
        # Images are encoded where their request is admitted: the time of such a step says nothing about its tokens.
        has_images = any(admission.request.images for admission in step.plan.admitted)
        step.mixed_units = room.learnable_units if num_decodes and not has_images else 0.0
        self._in_flight.append(step)
        if self.limits.speculate:
            self._drafter.pace.begin(self._now)
        return step.plan

    @property
    def _may_draft(self) -> bool:
        return self.limits.speculate > 0 and self._drafter.is_worthwhile

    def _plan_running(
        self, step: InFlight, running: list[Entry], wanted: list[int], room: PromptRoom, drafts: dict[int, list[int]]
    ) -> None:
        """Best rank first. Every decode gets its token; prompt chunks share the room."""
        for entry, num_wanted in zip(running, wanted, strict=True):
            begin, count = entry.num_scheduled, num_wanted
            if num_wanted > 1:
                count = entry.cut(begin, room.offer(count, begin), room.tokens + step.spare) if room.is_left else 0
            if count == 0 or entry.row is None:  # no row: preempted by a better one in this very loop
                continue
            guesses = drafts.get(entry.id, NO_DRAFTS) if drafts else NO_DRAFTS
            fits = begin + (total := count + len(guesses)) <= entry.capacity
            if (new_blocks := NO_BLOCKS if fits else self._grow(entry, total)) is not None:
                if num_wanted > 1:
                    room.spend(count, num_wanted, begin)
                step.add(entry, count, new_blocks, guesses)

    def _plan_admissions(self, step: InFlight, room: PromptRoom, before: Rank = LAST) -> None:
        """Rows for those who wait, as far as the room goes. With `before` only for those of a better rank: they leave a
        block to every running request and are behind none but decodes, so that none takes their blocks in this plan."""
        if not (self.queue and room.is_left and self._free_rows):
            return
        size = self.limits.block_size if self.limits.prefix_caching else 0
        filling = {entry.next_block(entry.node, entry.num_indexed, size) for entry in self.running}
        passed: list[Entry] = []
        while room.is_left and self._free_rows and len(passed) < LOOK_AHEAD and step.may_look_up:
            entry = self.queue.call()
            if entry is None:
                break
            if entry.rank >= before:
                passed.append(entry)
                break
            node, blocks, on_host = self._cached_prefix(entry)
            step.look_up(len(entry.tokens) // self.limits.block_size, len(on_host))
            upcoming = entry.next_block(node, len(blocks), size)
            # Preempted, and its last token is still on the way; or another request is computing what comes next:
            # in a moment it is in the cache. Or it waits for room for its adapter, and not for long yet.
            is_early = entry.num_pending or (upcoming and upcoming in filling and not entry.wants_prompt_logprobs)
            if is_early or self.adapters.is_overtaken(entry.request.adapter, self._now - entry.queued_at):
                passed.append(entry)
                continue
            begin = (len(blocks) + len(on_host)) * self.limits.block_size
            wanted = len(entry.tokens) - begin
            count = entry.cut(begin, room.offer(wanted, begin), room.tokens + step.spare)
            has_room = count > 0 and self.adapters.has_room(entry.request.adapter)
            if not has_room or not self._admit(step.plan, entry, node, blocks, on_host):
                passed.append(entry)
                break  # it waits for memory, or for a step with room for it, and no other overtakes it there
            new_blocks = self._grow(entry, count)
            assert new_blocks is not None, "_admit counted the blocks"
            room.spend(count, wanted, begin)
            step.add(entry, count, new_blocks)
            filling.add(upcoming)
        self.queue.send_back(passed)

    def _cached_prefix(self, entry: Entry) -> tuple[Node, list[int], list[Digest]]:
        """On the device, and behind that in host memory. Some token must always be computed, to get logits at all."""
        reusable = (len(entry.tokens) - 1) // self.limits.block_size
        if not self.limits.prefix_caching or entry.wants_prompt_logprobs:
            reusable = 0
        root = self.tree.root("" if self.limits.share_prefix_cache else entry.request.tenant, entry.request.adapter)
        node, blocks = self.tree.match(root, tokens := entry.tokens.tobytes(), reusable)
        return node, blocks, self.host.match(node, tokens, len(blocks), reusable)

    def _admit(self, plan: StepPlan, entry: Entry, node: Node, blocks: list[int], on_host: list[Digest]) -> bool:
        """Give a request a row and the cached part of its tokens, if the rest has a chance to fit."""
        tokens, size = entry.tokens, self.limits.block_size
        self.tree.lock(node)
        missing = -(-len(tokens) // size) - len(blocks)
        headroom = len(self.running)  # a block each, or the newcomer would be preempted at once
        if missing + headroom > self.pool.available + self.tree.num_evictable:
            self.tree.unlock(node)
            return False
        self.queue.remove(entry)
        entry.take_row(heapq.heappop(self._free_rows), node, blocks, self.limits)
        if on_host:
            slots, returning = self.host.reserve(on_host), self._grow(entry, len(on_host) * size)
            assert returning is not None, "they were counted"
            entry.num_scheduled = entry.capacity
            self.host.add_copies_in(slots, returning)
        if entry.epoch == 0:
            entry.num_cached = entry.num_scheduled
            entry.queue_time = self._now - entry.queued_at
            entry.tenant.served += entry.num_prompt - entry.num_cached
            self.shares.leave_queue(entry.request)
            self._deadlines.leave_queue(entry.id)
        entry.epoch += 1
        bisect.insort(self.running, entry, key=_rank)
        self.max_running_tokens += entry.max_len
        self.stats.prompt_tokens += len(tokens)
        self.stats.cached_tokens += entry.num_scheduled
        plan.admitted.append(self.adapters.admit(entry.admission(), plan.placements))
        return True

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _grow(self, entry: Entry, count: int) -> list[int] | None:
        """Blocks for `count` more tokens of `entry`; evicts, then preempts those behind it. None: it lost its own."""
        missing = -(-(entry.num_scheduled + count) // self.limits.block_size) - len(entry.blocks)
        while missing > self.pool.available:
            self.pool.free(self.tree.evict(missing - self.pool.available, self.host.keep))
            if missing > self.pool.available:
                last = self.running[-1]
                self._preempt(last)
                if last is entry:
                    return None
        if missing <= 0:
            return NO_BLOCKS
        entry.add_blocks(fresh := self.pool.allocate(missing), self.limits.block_size)
        return fresh

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
        self.adapters.release(entry.request.adapter)
        self.pool.free(self.tree.evict_beyond(self.limits.max_unused_blocks))
        del self.running[bisect.bisect_left(self.running, entry.rank, key=_rank)]
        self.max_running_tokens -= entry.max_len
        entry.forget_row()

    def _finish(self, entry: Entry) -> None:
        entry.done = True
        if self.limits.speculate:
            self._drafter.remember(entry)
        del self._entries[entry.id]
        self._retry.finish(1, self._now)
        self._deadlines.stop(entry.id)
        self._tenants.leave(entry.tenant)
        self.shares.give_back(entry.request, is_queued=entry.epoch == 0)
        if entry.row is not None:
            self._release(entry)
        else:
            self.queue.remove(entry)

    # ---- a result arrives -----------------------------------------------------------------------------------------

    def complete(self, result: StepResult, now: float = 0.0) -> list[tuple[int, Output]]:
        """Book the result of the oldest plan in flight. Returns what each request gets to see."""
        step = self._in_flight.popleft()
        if self.limits.speculate:
            self._drafter.learn(step.plan, result.forward_ns / 1e9, now)
        assert step.plan.id == result.id, f"result of step {result.id}, expected {step.plan.id}"
        self.host.land(step.plan.copies_out, failed=result.error is not None)
        if result.error is not None:
            return self._fail(step.planned, result.error)
        self.adapters.land(step.plan.placements)
        if step.mixed_units:
            self._budget.learn(step.mixed_units, result.forward_ns / 1e9)
        outputs: list[tuple[int, Output]] = []
        index, counts, errors = 0, iter(result.num_sampled) if result.num_sampled else None, result.row_errors
        for row, (entry, epoch, end, samples) in zip(step.plan.rows, step.planned, strict=True):
            first, index = index, index + (samples if counts is None or not samples else next(counts, 1))
            if entry.done:
                continue
            if epoch == entry.epoch:
                if entry.request.prompt_logprobs:
                    entry.book_scores(row, result)
                # Keys and values of a row that failed may be no numbers: they must not reach anybody else.
                failed = errors and any(place in errors for place in range(first, index))
                if end >= entry.full_at and entry.row is not None and not failed:
                    entry.offer_blocks(self.tree, end, self.limits.block_size)
            if samples:
                outputs.append((entry.id, self._book_sampled(entry, first, result)))
                if index > first + 1:
                    outputs += self._book_drafts(entry, range(first + 1, index), result)
        assert index == len(result.token_ids), f"{len(result.token_ids)} tokens, {index} were expected"
        self._drafter.take_proposals(step, result)
        return outputs

    def _book_drafts(self, entry: Entry, places: range, result: StepResult) -> list[tuple[int, Output]]:
        """Drafts that were right, and the token behind them, each as if a step of its own had sampled it."""
        entry.count_drafts(len(places))
        outputs, failed = [], any(each in result.row_errors for each in places)
        for place in itertools.takewhile(lambda _: not entry.done, places):
            if not failed:
                entry.offer_blocks(self.tree, len(entry.tokens), self.limits.block_size)
            outputs.append((entry.id, self._book_sampled(entry, place, result)))
            outputs[-1][1].is_draft = True
        return outputs

    def _book_sampled(self, entry: Entry, index: int, result: StepResult) -> Output:
        """A row may fail alone, if its grammar does."""
        if result.row_errors and (error := result.row_errors.get(index)) is not None:
            self._finish(entry)
            return Output(error=error)
        token, tokens = result.token_ids[index], entry.tokens
        tokens.append(token)
        entry.tenant.served += 1
        has_more = result.top_tokens or result.vectors
        output = result.output(index) if has_more else Output(token, result.logprobs[index])
        if len(tokens) == entry.first_len:
            entry.tell_about_prompt(output)
        if token in entry.end_ids or len(tokens) >= entry.max_len:
            output.finish_reason = entry.finish_reason(token, self.limits.eos_token_ids)
            if output.finish_reason is not None:
                self._finish(entry)
        return output

    def _fail(self, planned: list[PlannedRow], error: str) -> list[tuple[int, Output]]:
        failed = [entry for entry, *_ in planned if not entry.done]
        for entry in failed:
            self._finish(entry)
        return [(entry.id, Output(error=error)) for entry in failed]

    # ---- the shards were lost -------------------------------------------------------------------------------------

    def restart(self, limits: SchedulerLimits) -> list[tuple[int, Output]]:
        """Go on with new shards, which know no row and no block. Requests that ran wait again with the tokens they
        have, as if preempted; steps in flight never were. Returns the errors of requests that cannot go on."""
        suspects = {entry for step in self._in_flight for entry, *_ in step.planned}
        for entry in reversed(self.running):  # the best rank is in front at last
            entry.forget_row()
            self.queue.push_front(entry)
        self.stats.replays += len(self.running)
        self._use(limits)
        ended: list[tuple[int, Output]] = []
        for entry in list(self._entries.values()):
            entry.num_known = len(entry.tokens)
            num_losses = entry.count_loss() if entry in suspects else 0
            if (is_suspect := num_losses > MAX_LOSSES) or not entry.fits(limits):
                self._finish(entry)
                error = Refusal.LOST_TOO_OFTEN.format(num_losses) if is_suspect else Refusal.DOES_NOT_FIT
                ended.append((entry.id, Output(error=error)))
        return ended
