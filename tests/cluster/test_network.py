"""A shard's network: links to peers of the same group and identity, tunnels to its own socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from legato.cluster.connecting import LinkTarget, call
from legato.cluster.frames import BrokenLink, LinkRefused
from legato.cluster.identity import comparable_words, difference, model_fingerprint
from legato.cluster.layout import RankLayout
from legato.cluster.network import TUNNEL, ShardNetwork, ShardPlace
from legato.common.options import LauncherOptions
from legato.common.sockets import free_port

KEY = b"0123456789abcdef"
SAME = {"version": "1", "options": "--a=1 --b=2", "model": "m"}


def network(rank: int, port: int, path: Path, identity: dict[str, str] = SAME, group: str = "g") -> ShardNetwork:
    place = ShardPlace(RankLayout(2, 1, 2), rank, ("127.0.0.1", "127.0.0.2"), port, group, KEY)
    return ShardNetwork(place, identity, str(path))


def in_parallel(*calls: Callable[[], object]) -> list[object]:
    """The results, or the exceptions."""
    found: dict[int, object] = {}

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found.get(number) for number in range(len(calls))]


def test_two_shards_link_and_talk(tmp_path: Path) -> None:
    port = free_port()
    shards = [network(rank, port, tmp_path / str(rank)) for rank in (0, 1)]
    here, there = in_parallel(*(lambda shard=shard: shard.link(lambda _: None) for shard in shards))
    here[1].send(b"hello")  # type: ignore[index]
    assert there[0].receive(5) == b"hello"  # type: ignore[index]
    for shard in shards:
        shard.close()


def test_a_shard_of_other_options_is_refused_on_both_sides(tmp_path: Path) -> None:
    port = free_port()
    other = SAME | {"options": "--a=1 --b=3"}
    shards = [network(0, port, tmp_path / "0"), network(1, port, tmp_path / "1", other)]
    errors = in_parallel(*(lambda shard=shard: shard.link(lambda _: None) for shard in shards))
    assert all(isinstance(error, LinkRefused) for error in errors)
    assert all("rank 0 refuses rank 1: options differ: here --b=2, there --b=3" in str(error) for error in errors)
    for shard in shards:
        shard.close()


def test_tunnels_lead_to_the_shards_socket_once_it_is_there_and_only_within_the_group(tmp_path: Path) -> None:
    port = free_port()
    shard = network(1, port, tmp_path / "shard")
    target = LinkTarget("127.0.0.2", port + 2, KEY)

    async def run() -> bytes:
        with pytest.raises(BrokenLink, match="does not serve yet"):
            await call(target, {"group": "g", "purpose": TUNNEL})
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "shard"))
            listener.listen()
            with pytest.raises(BrokenLink, match="another group"):
                await call(target, {"group": "old", "purpose": TUNNEL})
            tunnel = await call(target, {"group": "g", "purpose": TUNNEL})
            inner, _ = listener.accept()
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(tunnel, b"question")
            assert await asyncio.to_thread(inner.recv, 100) == b"question"
            inner.sendall(b"answer")
            answer = await loop.sock_recv(tunnel, 100)
            inner.close()
            assert await loop.sock_recv(tunnel, 100) == b""
            tunnel.close()
            return answer

    assert asyncio.run(run()) == b"answer"
    shard.close()


def test_what_differs_is_named() -> None:
    assert difference(SAME, dict(SAME)) is None
    assert difference(SAME, SAME | {"version": "2"}) == "version differs: here 1, there 2"
    assert difference(SAME, SAME | {"model": "n"}) == "the files of the model differ"
    assert difference(SAME, None) is not None


def test_options_of_one_machine_are_not_compared() -> None:
    one = LauncherOptions(model_id="/a/model", dtype="float32", json_output=True, master_addr="10.0.0.1")
    other = LauncherOptions(model_id="/b/model", dtype="float32", huggingface_hub_cache="/x", master_addr="node-0")
    assert comparable_words(one) == comparable_words(other) == ["--dtype=float32"]


def test_the_fingerprint_of_a_model_changes_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    before = model_fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("not part of the model")
    assert model_fingerprint(tmp_path) == before
    data = bytearray(3 << 20)
    data[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert model_fingerprint(tmp_path) != before
