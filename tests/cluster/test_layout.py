"""Which ranks are where, and who talks to whom."""

from __future__ import annotations

import pytest

from legato.cluster.layout import RankLayout
from legato.common.errors import OptionError


def test_two_machines_of_two_shards_in_two_stages_keep_tensor_parallelism_within_a_machine() -> None:
    layout = RankLayout(2, 2, 2)
    assert [layout.stage(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [layout.node(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert all(layout.is_within_node(rank) for rank in range(4))
    assert [layout.peers(rank) for rank in range(4)] == [[2], [3], [0], [1]]


def test_one_stage_on_two_machines_links_every_pair() -> None:
    layout = RankLayout(2, 2)
    assert not layout.is_within_node(0)
    assert [layout.peers(rank) for rank in range(4)] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_stages_form_a_ring() -> None:
    layout = RankLayout(4, 1, 4)
    assert [layout.neighbour(rank, 1) for rank in range(4)] == [1, 2, 3, 0]
    assert [layout.peers(rank) for rank in range(4)] == [[1, 3], [0, 2], [1, 3], [0, 2]]


def test_stages_of_several_machines_have_both_kinds_of_links() -> None:
    layout = RankLayout(4, 1, 2)  # each stage is on two machines
    assert [layout.peers(rank) for rank in range(4)] == [[1, 2], [0, 3], [0, 3], [1, 2]]


def test_one_machine_without_stages_needs_no_links() -> None:
    assert not RankLayout(1, 8).needs_links
    assert RankLayout(1, 8).peers(3) == []


def test_stages_must_divide_the_shards() -> None:
    with pytest.raises(OptionError, match="must divide the number of shards, which is 6"):
        RankLayout(2, 3, 4)
