"""Events of the prefix cache: who follows them knows what the tree holds, and vLLM's readers can read them."""

from __future__ import annotations

import time

import msgspec
import pytest

from legato.common.errors import OptionError
from legato.ipc.kv_events import KvEventPage
from legato.router.monitoring import kv_events
from legato.router.monitoring.kv_events import KvEventLog, KvEventPublisher
from legato.scheduling.host_blocks import digest_of
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.state import GenerationRequest
from tests.fakes import Simulation

PROMPTS = [[100 * number + at for at in range(32)] for number in range(8)]


class Follower:
    """Knows of a tree what the events say."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.last: int | None = None
        self.num_complete = 0

    def ask(self, log: KvEventLog) -> None:
        page = msgspec.json.decode(log.page(self.last), type=KvEventPage)
        self.last = page.last
        self.num_complete += page.is_complete
        for event in page.events:
            if event.kind == "cleared":
                self.blocks.clear()
            for index, name in enumerate(event.hashes):
                if event.kind == "removed":
                    del self.blocks[name]
                    continue
                before = event.hashes[index - 1] if index else event.parent
                assert before is None or before in self.blocks, "the block before it is known"
                start = index * page.block_size
                self.blocks[name] = event.token_ids[start : start + page.block_size]


def simulation() -> Simulation:
    """Room for one conversation of eight blocks, and a little more."""
    return Simulation(SchedulerLimits(12, 4, 4, 64), vocab=50, depth=1)


def answer(shards: Simulation, number: int, prompt: list[int], tenant: str = "") -> None:
    shards.submit(GenerationRequest(number, prompt, 2, tenant=tenant))
    while shards.launch():
        shards.land()


def held(shards: Simulation) -> set[str]:
    return {digest_of(node).hex() for node in shards.scheduler.tree.nodes()}


def test_who_follows_the_events_knows_what_the_tree_holds() -> None:
    shards, follower = simulation(), Follower()
    log = KvEventLog(shards.scheduler)
    for number, prompt in enumerate(PROMPTS):
        answer(shards, number, prompt)
        log.flush()
        follower.ask(log)
        assert follower.blocks.keys() == held(shards)
        assert prompt[:4] in follower.blocks.values()
    assert follower.num_complete == 1, "only the first answer is all that the cache holds"


def test_blocks_of_one_prompt_are_one_event() -> None:
    shards = simulation()
    log = KvEventLog(shards.scheduler)
    answer(shards, 0, PROMPTS[0])
    events = msgspec.json.decode(log.page(None), type=KvEventPage).events
    assert [event.kind for event in events] == ["cleared", "stored"]
    assert len(events[1].hashes) == 8 and events[1].token_ids[:32] == PROMPTS[0]


def test_equal_tokens_of_two_owners_are_different_blocks() -> None:
    shards, follower = simulation(), Follower()
    log = KvEventLog(shards.scheduler)
    answer(shards, 0, PROMPTS[0][:8], tenant="a")
    answer(shards, 1, PROMPTS[0][:8], tenant="b")
    follower.ask(log)
    assert list(follower.blocks.values()).count(PROMPTS[0][:4]) == 2


def test_who_missed_too_many_gets_all_that_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_EVENTS", 3)
    shards, follower = simulation(), Follower()
    log = KvEventLog(shards.scheduler)
    follower.ask(log)
    for number, prompt in enumerate(PROMPTS):
        answer(shards, number, prompt)
        log.flush()
    follower.ask(log)
    assert follower.num_complete == 2 and follower.blocks.keys() == held(shards)


def test_a_number_from_before_a_restart_is_not_taken_for_one_of_ours() -> None:
    shards, follower = simulation(), Follower()
    follower.ask(KvEventLog(shards.scheduler))
    answer(shards, 0, PROMPTS[0])
    follower.ask(KvEventLog(shards.scheduler))
    assert follower.num_complete == 2 and follower.blocks.keys() == held(shards)


def test_other_shards_have_an_empty_cache() -> None:
    shards, follower = simulation(), Follower()
    log = KvEventLog(shards.scheduler)
    answer(shards, 0, PROMPTS[0])
    follower.ask(log)
    shards.scheduler.restart(shards.scheduler.limits)
    follower.ask(log)
    assert follower.blocks == {} and follower.num_complete == 1


class VllmStored(msgspec.Struct, tag="BlockStored", array_like=True):
    """As vLLM's subscribers declare it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class VllmRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int]
    medium: str | None = None


class VllmCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


def test_a_subscriber_of_vllms_events_follows_the_cache_over_zeromq() -> None:
    import zmq

    shards, publisher = simulation(), KvEventPublisher("tcp://127.0.0.1:*")
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.subscribe(b"")
    socket.connect(publisher.endpoint)
    log = KvEventLog(shards.scheduler, publisher)
    deadline = time.monotonic() + 60
    while not socket.poll(10):  # a subscription takes effect after a while
        assert time.monotonic() < deadline
        publisher.publish([], block_size=4)
    for number, prompt in enumerate(PROMPTS):
        answer(shards, number, prompt)
        log.flush()
    held_numbers = {int(name[:16], 16) for name in held(shards)}
    known: dict[int, list[int]] = {}
    numbers = []
    while known.keys() != held_numbers or not known:
        topic, number, payload = socket.recv_multipart()
        assert topic == b""
        numbers.append(int.from_bytes(number, "big"))
        batch = msgspec.msgpack.decode(payload, type=VllmBatch)
        assert abs(batch.ts - time.time()) < 60 and batch.data_parallel_rank == 0
        for event in batch.events:
            follow(known, event)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    socket.close()
    publisher.close()


def follow(known: dict[int, list[int]], event: VllmStored | VllmRemoved | VllmCleared) -> None:
    match event:
        case VllmStored(hashes, parent, token_ids, block_size):
            assert parent is None or parent in known
            for index, name in enumerate(hashes):
                known[name] = token_ids[index * block_size : (index + 1) * block_size]
        case VllmRemoved(hashes):
            for name in hashes:
                del known[name]
        case VllmCleared():
            known.clear()


def test_an_address_that_cannot_be_bound_is_refused() -> None:
    with pytest.raises(OptionError, match="--kv-events-endpoint nonsense"):
        KvEventPublisher("nonsense")
