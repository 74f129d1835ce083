"""Which graph a batch runs with, and which one is captured next."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from legato.server.graphs.captures import MISSES, STEPS_BETWEEN, CapturePolicy, decode_sizes, mixed_sizes


def of_decodes(max_rows: int, given: Sequence[int] = ()) -> CapturePolicy:
    return CapturePolicy(decode_sizes(max_rows, given), are_given=bool(given))


def captured(*sizes: int, max_rows: int = 128) -> CapturePolicy:
    policy = of_decodes(max_rows)
    for size in sizes:
        policy.note(size)
    return policy


def steps(policy: CapturePolicy, num_rows: int, count: int) -> list[int | None]:
    """What each of `count` steps of that many rows would have captured after it."""
    found = []
    for _ in range(count):
        policy.choose(num_rows)
        found.append(policy.after_step())
    return found


def test_sizes_are_exact_for_few_rows_and_then_coarse() -> None:
    assert decode_sizes(40) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40]


def test_a_shard_starts_with_sizes_that_double_up_to_the_largest() -> None:
    assert of_decodes(100).at_start == [104, 56, 32, 16, 8, 4, 2, 1]
    assert of_decodes(100, [4, 16]).at_start == [16, 4]
    assert of_decodes(1).at_start == [1]


def test_a_batch_runs_with_the_graph_of_its_size() -> None:
    assert captured(16, 24).choose(17) == 24


@pytest.mark.parametrize(("num_rows", "chosen"), [(16, None), (27, None), (28, 56), (56, 56), (57, None)])
def test_a_larger_graph_is_used_if_at_most_half_of_it_is_padding(num_rows: int, chosen: int | None) -> None:
    assert captured(1, 56).choose(num_rows) == chosen


def test_few_rows_are_padded_to_any_small_graph() -> None:
    assert captured(8).choose(1) == 8
    assert captured(24).choose(3) is None


def test_given_sizes_are_padded_to_as_they_are_and_larger_batches_have_none() -> None:
    policy = of_decodes(128, [4, 64])
    policy.note(64)
    assert (policy.choose(5), policy.choose(65)) == (64, None)


def test_a_size_is_captured_while_others_wait_once_it_was_missed_often_enough() -> None:
    policy = captured(1, 128)
    assert steps(policy, 1, STEPS_BETWEEN) == [None] * STEPS_BETWEEN
    assert steps(policy, 50, MISSES) == [None] * (MISSES - 1) + [56]


def test_many_steps_lie_between_two_captures() -> None:
    policy = captured(1, 128)
    assert steps(policy, 50, STEPS_BETWEEN - 1) == [None] * (STEPS_BETWEEN - 1)
    assert steps(policy, 50, 1) == [56]
    policy.note(56)
    assert steps(policy, 20, STEPS_BETWEEN) == [None] * (STEPS_BETWEEN - 1) + [24]


def test_what_was_missed_most_comes_first() -> None:
    policy = captured(1, 128)
    steps(policy, 20, MISSES)
    steps(policy, 50, MISSES + 1)
    assert policy.when_idle() == 56
    assert steps(policy, 1, STEPS_BETWEEN)[-1] == 56


def test_when_idle_small_sizes_come_before_all_others() -> None:
    policy = captured(1, 24, max_rows=24)
    order = []
    while (size := policy.when_idle()) is not None:
        order.append(size)
        policy.note(size)
    assert order == [2, 4, 8, 3, 5, 6, 7, 16]
    assert not policy.num_pending


def test_frequent_sizes_have_their_graph_after_a_hundred_steps() -> None:
    policy = captured(1, 256, max_rows=256)
    for step in range(100):
        policy.choose(97 + step % 32)  # the sizes 104 to 128, in turn
        if (size := policy.after_step()) is not None:
            policy.note(size)
    assert {104, 112, 120, 128} <= policy.captured


def test_after_a_failure_nothing_more_is_captured_and_the_rest_still_serves() -> None:
    policy = captured(1, 56)
    policy.stop()
    assert policy.when_idle() is None and set(steps(policy, 20, 64)) == {None}
    assert policy.choose(56) == 56


@pytest.mark.parametrize("max_rows", [1, 5, 8, 9, 100, 512])
def test_the_sizes_of_the_start_are_enough_for_every_batch(max_rows: int) -> None:
    policy = of_decodes(max_rows)
    for size in policy.at_start:
        policy.note(size)
    assert all(policy.choose(num_rows) is not None for num_rows in range(1, max_rows + 1))


@pytest.mark.parametrize("max_rows", [1, 64, 65, 512])
def test_steps_with_prompts_find_a_graph_from_the_start_up_to_a_thousand_tokens(max_rows: int) -> None:
    sizes = mixed_sizes(max_rows)
    policy = CapturePolicy(sizes, small=sizes[0])
    for size in policy.at_start:
        policy.note(size)
    assert all(policy.choose(num_tokens) is not None for num_tokens in range(1, 1025))
    assert policy.choose(1025) is None


def test_a_size_that_is_slower_than_a_larger_one_is_left_out() -> None:
    sizes = decode_sizes(512)
    assert 448 not in sizes and {416, 480, 512} < set(sizes)
    policy = of_decodes(512)
    for size in sizes:
        policy.note(size)
    assert [policy.choose(num_rows) for num_rows in (416, 417, 448, 480)] == [416, 480, 480, 480]
