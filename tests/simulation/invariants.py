"""What is true after every step, whatever happened before."""

from __future__ import annotations

from legato.router.recovery import grammars_of
from legato.router.step_loop import PROBE, Shards, StepLoop
from legato.scheduling.limits import MAX_LOSSES, Refusal, SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.shares import EVERYBODY, FACTOR
from legato.scheduling.state import GenerationRequest, ModelLimits
from tests.fakes import check_blocks
from tests.simulation.clients import Client
from tests.simulation.shards import SimulatedShards


def check_totals(scheduler: Scheduler) -> None:
    """After every step, so it takes no longer than the step has rows."""
    num_private = 0
    for entry in scheduler.running:
        num_private += len(entry.private)
    num_blocks = scheduler.pool.available + len(scheduler.tree) + num_private
    assert num_blocks == scheduler.pool.total, f"{scheduler.pool.total - num_blocks} blocks are lost"
    assert len(scheduler.running) + len(scheduler._free_rows) == scheduler.limits.max_rows, "a row is lost"
    assert len(scheduler.running) + len(scheduler.queue) == len(scheduler._entries), "a request neither runs nor waits"


def check_everything(scheduler: Scheduler, now: float, lateness: float) -> None:
    """Every block, row, request, share and deadline, one by one. `lateness` is how late a timer may be."""
    check_totals(scheduler)
    check_blocks(scheduler)
    entries, limits = scheduler._entries.values(), scheduler.limits
    running = [entry.rank for entry in scheduler.running]
    assert running == sorted(running)
    waiting = {entry.id for entry in entries if entry.row is None}
    assert set(scheduler.queue) == waiting and len(scheduler.queue) == len(waiting)
    in_line = [id for level in scheduler.queue._levels.values() for line in level._lines.values() for id in line]
    assert sorted(in_line) == sorted(waiting), "a request was called and not sent back"
    for name, tenant in scheduler._tenants._known.items():
        assert tenant.num_requests == sum(entry.request.tenant == name for entry in entries)
    if limits.max_requests is not None:
        assert len(entries) <= limits.max_requests, "more requests than --max-concurrent-requests"
        assert scheduler.shares.permits.free == limits.max_requests - len(entries), "a permit is lost"
    if limits.max_queued_tokens is not None:
        assert scheduler.shares.queued_tokens.free == limits.max_queued_tokens - num_queued_tokens(scheduler)
    for entry in entries:
        if entry.id == PROBE.id:  # nobody waits for it, and without shards nobody looks
            continue
        age = now - entry.queued_at - lateness
        is_late = 0 < limits.request_timeout < age or (entry.epoch == 0 and 0 < limits.queue_timeout < age)
        assert not is_late, f"request {entry.id} is {age:g} s old, past its deadline"


def num_queued_tokens(scheduler: Scheduler) -> int:
    return sum(len(entry.request.input_ids) for entry in scheduler._entries.values() if entry.epoch == 0)


def reasons_to_refuse(request: GenerationRequest, scheduler: Scheduler) -> set[str]:
    """Computed from the requests that are here, not from what the scheduler has counted."""
    limits, entries = scheduler.limits, list(scheduler._entries.values())
    mine = [entry for entry in entries if entry.request.tenant == request.tenant]
    reasons = set()
    if limits.max_requests is not None:
        free = limits.max_requests - len(entries)
        if free < 1 or (request.tenant != EVERYBODY and len(mine) >= FACTOR * free):
            reasons.add(Refusal.OVERLOADED)
    if limits.max_queued_tokens is not None:
        free = limits.max_queued_tokens - num_queued_tokens(scheduler)
        held = sum(len(entry.request.input_ids) for entry in mine if entry.epoch == 0)
        if len(request.input_ids) > free or (request.tenant != EVERYBODY and held >= FACTOR * free):
            reasons.add(Refusal.OVERLOADED)
    if len(request.input_ids) + request.max_new_tokens > limits.max_tokens:
        reasons.add(Refusal.DOES_NOT_FIT)
    return reasons


class CheckedStepLoop(StepLoop):
    """Counts independently who is replayed and who has been part of too many losses."""

    clients: dict[int, Client]
    lost_shards: SimulatedShards

    def resume(self, shards: Shards, scheduler_limits: SchedulerLimits, limits: ModelLimits) -> None:
        scheduler = self.scheduler
        num_running, num_replays = len(scheduler.running), scheduler.stats.replays
        suspects = _suspects(self.lost_shards) & set(scheduler._entries) & set(self.clients)
        for request_id in suspects:
            client, num_tokens = self.clients[request_id], len(scheduler._entries[request_id].tokens)
            client.num_losses = client.num_losses + 1 if client.lost_at == num_tokens else 1
            client.lost_at = num_tokens
        before = set(scheduler._entries)
        assert isinstance(shards, SimulatedShards)
        missing = set(grammars_of(scheduler.requests)) - shards.grammars
        assert not missing, f"the new shards have not compiled {missing}: a step would wait for it"
        super().resume(shards, scheduler_limits, limits)
        assert scheduler.stats.replays == num_replays + num_running, "replays are counted wrong"
        assert (scheduler.num_in_flight, len(scheduler.running)) == (0, 0), "something runs on shards that are gone"
        ended = before - set(scheduler._entries)
        for request_id in before & set(self.clients):
            client = self.clients[request_id]
            length = len(client.request.input_ids) + client.request.max_new_tokens
            is_last = request_id in suspects and client.num_losses > MAX_LOSSES
            must_end = is_last or length > scheduler_limits.max_tokens
            assert (request_id in ended) == must_end, f"request {request_id} after {client.num_losses} losses"


def _suspects(lost: SimulatedShards) -> set[int]:
    """Requests in steps whose results never came."""
    rows = {row: state.request_id for row, state in lost.shard.rows.items()}
    found: set[int] = set()
    for plan in lost.outstanding:
        rows.update((admission.row, admission.request.id) for admission in plan.admitted)
        found.update(rows[row] for row in plan.rows)
    return found
