"""One key against another inside an HTTP worker: permits and bodies that wait for a tokenizer."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from legato.api.errors import Overloaded
from legato.http.concurrency import ConcurrencyLimit


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
    """The attack: as many bodies of the largest size as there are permits."""
    limit = ConcurrencyLimit(4096, validated_bytes=10_000_000)
    with ExitStack() as stack:
        with pytest.raises(Overloaded):
            for _ in range(4096):
                stack.enter_context(limit.validating(2_000_000, "flood"))
        stack.enter_context(limit.validating(1000, "visitor"))
    with limit.validating(20_000_000, "alone"):  # the operator allows larger bodies
        pass
