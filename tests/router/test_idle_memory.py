"""KV blocks that nobody needs are given back while nothing runs; no step uses them until the shards have answered."""

from __future__ import annotations

import asyncio

from legato.router.idle_memory import QUIET_LOOKS, IdleMemory
from legato.router.shards import ShardsLost
from tests.router.test_step_loop import Bench, bench, request, turns


async def served(bench: Bench, request_id: int = 1) -> None:
    bench.submit(request(request_id))
    await turns()
    bench.shards.answer_all()
    await turns()


def test_it_takes_several_looks_without_work() -> None:
    async def test(bench: Bench) -> None:
        memory = IdleMemory(bench.loop)
        await served(bench)
        memory.look()
        assert [memory.look() for _ in range(QUIET_LOOKS)] == [False] * (QUIET_LOOKS - 1) + [True]
        await served(bench, 2)  # came and went between two looks
        assert not memory.look()
        bench.submit(request(3))
        await turns()
        assert [memory.look() for _ in range(QUIET_LOOKS + 1)] == [False] * (QUIET_LOOKS + 1)

    bench(test)


def test_blocks_that_were_used_are_given_back_once_and_those_of_the_prefix_tree_stay() -> None:
    async def test(bench: Bench) -> None:
        await served(bench)
        pool, kept = bench.scheduler.pool, len(bench.scheduler.tree)
        released: list[list[int]] = []

        async def release(blocks: list[int]) -> None:
            assert pool.available == 64 - kept - len(blocks), "a step could use them meanwhile"
            released.append(blocks)

        bench.shards.release = release  # type: ignore[method-assign]
        memory = IdleMemory(bench.loop)
        await memory.release()
        await memory.release()
        cached = {node.block for node in bench.scheduler.tree.nodes()}
        assert len(released) == 1 and released[0] and not cached & set(released[0])
        assert pool.available == 64 - kept

    bench(test, max_unused_blocks=1)


def test_blocks_of_lost_shards_are_not_handed_out() -> None:
    async def test(bench: Bench) -> None:
        await served(bench)

        async def release(blocks: list[int]) -> None:
            raise ShardsLost("gone")

        bench.shards.release = release  # type: ignore[method-assign]
        before = bench.scheduler.pool.available
        await IdleMemory(bench.loop).release()
        assert bench.scheduler.pool.available < before
        await asyncio.sleep(0)

    bench(test)
