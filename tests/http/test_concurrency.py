"""One key against another inside an HTTP worker: permits and bodies that wait for a tokenizer."""

from __future__ import annotations

import asyncio

import pytest

from legato.api.errors import Overloaded
from legato.http.concurrency import LONG_BODY, ConcurrencyLimit


def test_one_key_cannot_take_all_permits_of_a_worker() -> None:
    limit = ConcurrencyLimit(100)
    with pytest.raises(Overloaded):
        for _ in range(101):
            limit.take(1, "flood")
    assert limit.free == 20
    limit.take(10, "visitor")
    limit.release(10, "visitor")


def test_without_keys_all_permits_can_be_taken_and_no_more() -> None:
    limit = ConcurrencyLimit(10)
    limit.take(8)
    with pytest.raises(Overloaded):
        limit.take(3)
    limit.take(2)
    assert limit.free == 0


def test_more_sequences_than_permits_never_fit() -> None:
    with pytest.raises(Overloaded):
        ConcurrencyLimit(1).take(2)


def test_long_bodies_that_wait_for_a_tokenizer_are_bounded_in_bytes() -> None:
    """The attack: as many bodies of the largest size as there are permits. One is validated at a time, a few wait."""
    outcomes: list[str] = []
    num_validated, most = 0, 0

    async def validate(limit: ConcurrencyLimit, num_bytes: int, tenant: str) -> None:
        nonlocal num_validated, most
        try:
            async with limit.validating(num_bytes, tenant):
                num_validated += num_bytes >= LONG_BODY
                most = max(most, num_validated)
                await asyncio.sleep(0)
                num_validated -= num_bytes >= LONG_BODY
            outcomes.append(tenant)
        except Overloaded:
            outcomes.append(f"{tenant} refused")

    async def attack() -> None:
        limit = ConcurrencyLimit(4096, validated_bytes=10_000_000)
        flood = [asyncio.create_task(validate(limit, 2_000_000, "flood")) for _ in range(100)]
        await asyncio.sleep(0)
        await validate(limit, 1000, "visitor")
        assert outcomes.count("flood refused") == 96 and outcomes[-1] == "visitor"
        await asyncio.gather(*flood)
        await validate(limit, 20_000_000, "alone")  # the operator allows larger bodies

    asyncio.run(attack())
    assert outcomes.count("flood") == 4 and outcomes[-1] == "alone"
    assert most == 1
