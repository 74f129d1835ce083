"""Links between shards: bytes in order, ends that are noticed, and collectives whose sums have the same bits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from legato.cluster.frames import BrokenLink, FrameKind, header, message
from legato.cluster.links import TensorLink
from legato.layers.shard import Shard
from legato.server.nodes.collectives import LinkCollectives


@pytest.fixture
def pair() -> Iterator[tuple[TensorLink, socket.socket]]:
    """A link, and the bare socket at its other end."""
    one, other = socket.socketpair()
    link = TensorLink(one, 1)
    yield link, other
    link.close()
    other.close()


def test_messages_arrive_in_order_and_large_ones_do_not_block() -> None:
    one, other = socket.socketpair()
    here, there = TensorLink(one, 1), TensorLink(other, 0)
    large = bytes(5_000_000)
    for link in (here, there):  # both send before either receives
        link.send(large)
        link.send(b"small")
    for link in (here, there):
        assert link.receive(len(large)) == large
        assert link.receive(5) == b"small"
        link.close()


def test_a_message_of_another_length_is_an_error(pair: tuple[TensorLink, socket.socket]) -> None:
    link, other = pair
    other.sendall(header(FrameKind.TENSOR, 0, 3) + b"abc")
    with pytest.raises(BrokenLink, match="3 bytes arrived from rank 1, 4 were expected"):
        link.receive(4)


@pytest.mark.parametrize("data", [b"no message at all", message(FrameKind.HELLO), header(FrameKind.TENSOR, 7, 0)])
def test_what_is_no_message_or_out_of_order_ends_the_link(pair: tuple[TensorLink, socket.socket], data: bytes) -> None:
    link, other = pair
    other.sendall(data)
    with pytest.raises(BrokenLink, match="lost the link to rank 1"):
        link.receive(1)


def test_the_end_of_a_link_is_told_and_stays() -> None:
    one, other = socket.socketpair()
    told: list[str] = []
    ended = threading.Event()
    link = TensorLink(one, 1, lambda reason: (told.append(reason), ended.set()))  # type: ignore[func-returns-value]
    other.sendall(header(FrameKind.TENSOR, 0, 10) + b"half")
    other.close()
    assert ended.wait(10)
    assert told == ["lost the link to rank 1: the other end closed the link"]
    for _ in range(2):
        with pytest.raises(BrokenLink):
            link.receive(10)


def test_a_message_that_does_not_come_in_time(pair: tuple[TensorLink, socket.socket]) -> None:
    with pytest.raises(BrokenLink, match="nothing arrived from rank 1"):
        pair[0].receive(1, timeout=0.01)


def groups(size: int) -> list[Shard]:
    """Shards whose collectives go over links between all of them."""
    links: list[dict[int, TensorLink]] = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one + 1, size):
            here, there = socket.socketpair()
            links[one][other], links[other][one] = TensorLink(here, other), TensorLink(there, one)
    return [Shard(rank, size, collectives=LinkCollectives(rank, range(size), links[rank])) for rank in range(size)]


def on_all(shards: list[Shard], call: object) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda shard=shard: found.__setitem__(shard.rank, call(shard)))  # type: ignore[operator]
        for shard in shards
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[shard.rank] for shard in shards]


def test_sums_have_the_same_bits_on_all_ranks() -> None:
    shards = groups(3)
    parts = [torch.randn(700, 300, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    sums = on_all(shards, lambda shard: shard.all_reduce(parts[shard.rank].clone()))
    assert all(torch.equal(each, sums[0]) for each in sums)
    torch.testing.assert_close(sums[0], sum(parts), rtol=0, atol=0)


def test_columns_are_gathered_in_the_order_of_ranks_and_the_least_value_is_agreed_on() -> None:
    shards = groups(2)
    columns = on_all(shards, lambda shard: shard.gather_columns(torch.full((3, 2), float(shard.rank))))
    assert all(torch.equal(each, torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 3)) for each in columns)
    assert on_all(shards, lambda shard: shard.least(7 - shard.rank, torch.device("cpu"))) == [6, 6]
