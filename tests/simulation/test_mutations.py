"""Bugs put in on purpose: each must be found within a few seeds, or the simulation proves nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from legato.common.restarts import RestartBudget
from legato.router.monitoring.health import HealthMonitor
from legato.router.port import Port
from legato.router.recovery import Recovery
from legato.router.step_loop import PROBE, StepLoop
from legato.scheduling.blocks import BlockPool
from legato.scheduling.entry import Entry
from legato.scheduling.host_blocks import Copies, HostBlocks
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.prefix_tree import Node, PrefixTree
from legato.scheduling.queue import Queue
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.shares import RequestShares
from legato.scheduling.state import Output, StepResult
from tests.simulation.world import SimulationFailed, simulate

MOST_SEEDS = 200

Patch = Callable[[pytest.MonkeyPatch], None]


def instead(owner: type, name: str, wrap: Callable[..., Any]) -> Patch:
    """`wrap` gets the method that it replaces, and what that gets."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: wrap(original, *args, **kwargs))

    return apply


def every(count: int, rare: Callable[..., Any]) -> Callable[..., Any]:
    """`rare` on every so many calls, and the original on all others."""
    calls = itertools.count(1)

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return rare(original, *args, **kwargs) if next(calls) % count == 0 else original(*args, **kwargs)

    return call


def skip(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Nothing happens."""


async def skip_waiting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Nothing happens."""


def twice(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    original(*args, **kwargs)
    return original(*args, **kwargs)


def put_end_twice(original: Callable[..., Any], port: Port, request_id: int, output: Output) -> None:
    original(port, request_id, output)
    if output.finish_reason is not None:
        original(port, request_id, output)


def free_one_less(original: Callable[..., Any], pool: BlockPool, blocks: list[int]) -> None:
    original(pool, blocks[:-1])


def forget_last_token(original: Callable[..., Any], scheduler: Scheduler, limits: Any) -> Any:
    """It is computed, and told, again."""
    for entry in scheduler._entries.values():
        if entry.num_generated:
            entry.tokens.pop()
    return original(scheduler, limits)


def skip_a_token(original: Callable[..., Any], scheduler: Scheduler, limits: Any) -> Any:
    """As if a token had been sampled that nobody was told of."""
    for entry in scheduler._entries.values():
        if entry.num_generated:
            entry.tokens.append(entry.tokens[-1])
    return original(scheduler, limits)


def keep_tree(original: Callable[..., Any], scheduler: Scheduler, limits: SchedulerLimits) -> None:
    """Prefixes that other shards computed. All counts are right: only what is read from the blocks is not."""
    tree = getattr(scheduler, "tree", None)
    original(scheduler, limits)
    if tree is None or any(node.block >= limits.num_blocks for node in tree.nodes()):
        return
    for node in tree.nodes():
        node.users = 0
        tree._offer(node)
    tree._num_unused = len(tree)
    scheduler.tree = tree
    taken = {node.block for node in tree.nodes()}
    scheduler.pool._free = [block for block in scheduler.pool._free if block not in taken]


def keep_node(original: Callable[..., Node], tree: PrefixTree, node: Node) -> Node:
    """A block is given away, and whoever looks for its prefix finds it still."""
    parent = original(tree, node)
    parent.children[node.key] = node
    return parent


class Unlisted(dict[int, str]):
    def __contains__(self, key: object) -> bool:
        return False


def share_failed_blocks(original: Callable[..., Any], scheduler: Scheduler, result: StepResult, now: float) -> Any:
    """What a row that failed has written enters the prefix tree."""
    result.row_errors = Unlisted(result.row_errors)
    return original(scheduler, result, now)


def count_all_drafts(original: Callable[..., Any], entry: Entry, num_accepted: int) -> None:
    """One more is taken for computed than was right."""
    original(entry, num_accepted)
    entry.num_scheduled += 1


def run_ahead(original: Callable[..., Any], scheduler: Scheduler, now: float) -> Any:
    """The next step is planned as if all drafts in flight were wrong."""
    hidden = [step.plan.drafts for step in scheduler._in_flight]
    for step in scheduler._in_flight:
        step.plan.drafts = {}
    try:
        return original(scheduler, now)
    finally:
        for step, drafts in zip(scheduler._in_flight, hidden, strict=False):
            step.plan.drafts = drafts


def trust_copies(original: Callable[..., tuple[Copies, Copies]], host: HostBlocks) -> tuple[Copies, Copies]:
    """Blocks come back from slots into which a step that fails was to copy them."""
    copies = original(host)
    host._leaving.clear()
    return copies


def read_taken_slots(original: Callable[..., Any], host: HostBlocks) -> int | None:
    """A block makes room, and is found still."""
    oldest = host._returned or host._slots
    digest = next(iter(oldest), None)
    slot: int | None = original(host)
    if digest is not None and slot is not None:
        host._slots[digest] = slot
    return slot


def cancel_none(original: Callable[..., Any], scheduler: Scheduler, request_id: int) -> None:
    """But the probe, which is sent again."""
    if request_id == PROBE.id:
        original(scheduler, request_id)


def never_pump(original: Callable[..., Any], steps: StepLoop, request: Any, receiver: Any) -> None:
    """A request that comes when nothing runs wakes nobody."""
    is_idle = not steps._sent
    before, steps._pump_is_due = steps._pump_is_due, steps._pump_is_due or is_idle
    original(steps, request, receiver)
    steps._pump_is_due = before


TOKEN = "got token"
# What is broken, and what the simulation must say of it.
MUTATIONS: dict[str, tuple[Patch, str]] = {
    "a block leaks when a request ends": (instead(BlockPool, "free", every(20, free_one_less)), "blocks are lost"),
    "a token is lost on its way": (instead(Port, "put", every(200, skip)), TOKEN),
    "a token is sent twice": (instead(Port, "put", every(200, twice)), TOKEN),
    "the end is sent twice": (instead(Port, "put", put_end_twice), "ends twice"),
    "a token is repeated after a replay": (instead(Scheduler, "restart", forget_last_token), TOKEN),
    "a token is lost in a replay": (instead(Scheduler, "restart", skip_a_token), TOKEN),
    "a request does not wake an idle router": (instead(StepLoop, "submit", never_pump), "do not end"),
    "a result does not lead to the next step": (instead(StepLoop, "_pump", every(50, skip)), "do not end"),
    "prefixes outlive their shards": (instead(Scheduler, "_use", keep_tree), f"{TOKEN}|another tenant"),
    "an evicted prefix is found": (instead(PrefixTree, "_remove", keep_node), ""),
    "blocks of failed rows are shared": (instead(Scheduler, "complete", share_failed_blocks), TOKEN),
    "drafts that were wrong count as computed": (instead(Entry, "count_drafts", count_all_drafts), ""),
    "steps run ahead of drafts": (instead(Scheduler, "plan", run_ahead), ""),
    "copies of failed steps are trusted": (
        instead(HostBlocks, "take_copies", trust_copies),
        f"{TOKEN}|another tenant",
    ),
    "slots are read that others were given": (
        instead(HostBlocks, "_forget_oldest", read_taken_slots),
        f"{TOKEN}|another tenant",
    ),
    "hung shards are not noticed": (instead(StepLoop, "_watch", skip), "not noticed"),
    "shards that hang without work are not noticed": (
        instead(HealthMonitor, "_check_idle_shards", skip_waiting),
        "hung shards were not noticed|not healthy",
    ),
    "deadlines are never looked at": (instead(StepLoop, "_set_alarm", skip), "deadline"),
    "a cancelled request goes on": (instead(Scheduler, "cancel", cancel_none), "was cancelled"),
    "requests of a lost worker go on": (instead(Port, "close", skip), "was cancelled"),
    "losses are not counted": (instead(Entry, "count_loss", lambda original, entry: 0), "after 3 losses"),
    "restarts are not counted": (
        instead(RestartBudget, "spend", lambda original, budget, now, was_ready: 0.0),
        "restarted (after|more often)",
    ),
    "requests are not told of the end": (instead(StepLoop, "_lose", skip), "told of the end|do not end"),
    "a permit is lost": (instead(RequestShares, "give_back", every(20, skip)), "a permit is lost"),
    "a preempted request is forgotten": (instead(Queue, "push_front", every(5, skip)), "neither runs nor waits"),
    "grammars are not compiled by new shards": (
        instead(Recovery, "_prepare_grammars", skip_waiting),
        "have not compiled",
    ),
    "new shards are never tried": (instead(StepLoop, "prove", skip), "do not end|not healthy"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply, message = MUTATIONS[mutation]
    apply(monkeypatch)
    with pytest.raises(SimulationFailed, match=f"^seed [0-9]+ failed: AssertionError.*({message})"):
        for seed in range(MOST_SEEDS):
            simulate(seed)
